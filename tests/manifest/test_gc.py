"""Garbage collection as a pure function: whatever anybody may still need is kept, and the rest goes."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore.store import ObjectInfo
from manifest.gc import FORGOTTEN, Encoding, Holdings, Policy, Reason, collectable
from manifest.keys import chunk_key, version_name
from manifest.lease import Lease

NOW = 1_000_000.0


def encoding(version: int, base: int | None, written: float, *, name: str, chunks: int = 1) -> Encoding:
    attempt = f"{name}{version:x}".rjust(32, "0")
    keys = {chunk_key(version, bytes.fromhex(attempt), 0, n): 10 for n in range(chunks)}
    return Encoding(base, attempt, keys, written)


def info(key: str, age: float, size: int = 10) -> ObjectInfo:
    return ObjectInfo(key, size, NOW - age)


def objects_of(encodings: Iterable[Encoding]) -> list[ObjectInfo]:
    return [ObjectInfo(key, size, e.written) for e in encodings for key, size in e.chunks.items()]


def holdings(
    versions: Mapping[int, Encoding], alternates: Mapping[int, Encoding] | None = None, **changes: object
) -> Holdings:
    alternates = alternates or {}
    held = Holdings(
        now=NOW,
        committed={v: e.written for v, e in versions.items()},
        versions=versions,
        alternates=alternates,
        obscure=(),
        objects=objects_of([*versions.values(), *alternates.values()]),
        temporaries=(),
        leases=(),
    )
    return replace(held, **changes)  # type: ignore[arg-type]


def chain(length: int, age: float = 1000.0) -> dict[int, Encoding]:
    """Version 0 whole, then deltas, each a second younger; the newest is `age` old."""
    return {
        v: encoding(v, v - 1 if v else None, NOW - age - (length - 1 - v), name="a") for v in range(length)
    }


def versions_of(held: Holdings, policy: Policy) -> dict[int, set[Reason]]:
    """Reasons of what may go, by version."""
    out: dict[int, set[Reason]] = {}
    for doomed in collectable(held, policy).objects:
        out.setdefault(int(doomed.key.split("/")[1]), set()).add(doomed.reason)
    return out


def test_what_lies_below_the_newest_settled_anchor_goes() -> None:
    alternates = {6: encoding(6, None, NOW - 200, name="b"), 3: encoding(3, None, NOW - 300, name="b")}
    held = holdings(chain(9), alternates)
    garbage = collectable(held, Policy(grace=100))
    assert garbage.floor == 6
    assert {doomed.key for doomed in garbage.objects} == {
        key for v in range(6) for e in (held.versions[v], held.alternates.get(v)) if e for key in e.chunks
    }
    assert garbage.nbytes == 70


def test_an_anchor_younger_than_the_grace_period_frees_nothing() -> None:
    alternates = {6: encoding(6, None, NOW - 100, name="b")}
    assert collectable(holdings(chain(9), alternates), Policy(grace=100)).floor == 0


def test_an_anchor_whose_objects_are_not_all_there_frees_nothing() -> None:
    alternates = {6: encoding(6, None, NOW - 500, name="b", chunks=2)}
    held = holdings(chain(9), alternates)
    lost = [o for o in held.objects if o.key != next(iter(alternates[6].chunks))]
    assert collectable(held, Policy(100)).floor == 6
    assert collectable(replace(held, objects=lost), Policy(100)).objects == ()
    cut = [replace_size(o) if o.key in alternates[6].chunks else o for o in held.objects]
    assert collectable(replace(held, objects=cut), Policy(100)).objects == ()


def replace_size(one: ObjectInfo) -> ObjectInfo:
    return ObjectInfo(one.key, one.size - 1, one.modified)


def test_an_anchor_that_a_later_version_skips_frees_nothing_that_it_needs() -> None:
    versions = chain(5) | {4: encoding(4, 2, NOW - 1000, name="a")}
    assert (
        collectable(holdings(versions, {3: encoding(3, None, NOW - 500, name="b")}), Policy(100)).floor == 0
    )
    assert (
        collectable(holdings(versions, {2: encoding(2, None, NOW - 500, name="b")}), Policy(100)).floor == 2
    )


def test_a_version_that_does_not_exist_is_not_decided_though_later_ones_are() -> None:
    alternates = {6: encoding(6, None, NOW - 500, name="b")}
    held = holdings(chain(9), alternates)
    later = {version: own for version, own in held.versions.items() if version >= 4}
    committed = {version: when for version, when in held.committed.items() if version != 3}
    garbage = collectable(replace(held, committed=committed, versions=later), Policy(100))
    assert {int(doomed.key.split("/")[1]) for doomed in garbage.objects} == {0, 1, 2, 4, 5}


def test_a_live_lease_keeps_what_its_version_needs() -> None:
    alternates = {v: encoding(v, None, NOW - 500, name="b") for v in (2, 6)}

    def floor(needs: int | None, silent: float, renew: float = 1.0) -> int | None:
        lease = Lease("worker", needs, renew, NOW - silent)
        garbage = collectable(holdings(chain(9), alternates, leases=[lease]), Policy(grace=100))
        if garbage.floor != 6 and garbage.bound is not None:
            assert "worker" in garbage.bound.why
        return garbage.floor

    assert floor(needs=4, silent=5) == 2
    assert floor(needs=1, silent=5) == 0
    assert floor(needs=None, silent=5) == 6
    assert floor(needs=4, silent=100) == 2
    assert floor(needs=4, silent=101) == 6
    assert floor(needs=4, silent=101, renew=40) == 2
    assert floor(needs=0, silent=1e6, renew=1e9) == 6, "nobody may hold it for ever by promising little"


def test_the_policy_keeps_the_newest_versions_restorable() -> None:
    alternates = {v: encoding(v, None, NOW - 500, name="b") for v in (2, 6)}
    held = holdings(chain(9), alternates)
    assert [collectable(held, Policy(100, keep)).floor for keep in (1, 3, 4, 7, 8, 100)] == [6, 6, 2, 2, 0, 0]


def test_young_versions_keep_what_they_need() -> None:
    versions = chain(9, age=96)
    alternates = {v: encoding(v, None, NOW - 101, name="b") for v in (2, 7)}
    assert collectable(holdings(versions, alternates), Policy(grace=100)).floor == 2


def attempt_objects(version: int, attempt: str, *ages: float) -> list[ObjectInfo]:
    name = f"{version_name(version)}/{attempt}"
    return [info(f"chunks/{name}/0-{n}.chunk", age) for n, age in enumerate(ages)]


def test_orphans_go_once_their_version_is_decided_and_all_of_them_are_old() -> None:
    old, young, undecided = "c" * 32, "d" * 32, "e" * 32
    extra = [
        *attempt_objects(3, old, 900, 101),
        *attempt_objects(3, young, 900, 99),  # a compaction that is still running
        *attempt_objects(4, undecided, 900),
        info(f"attempts/{version_name(3)}/{old}.msgpack", 900),
        info(f"attempts/{version_name(4)}/{undecided}.msgpack", 900),
        info(f"parts/{version_name(3)}/{chain(4)[3].attempt}/0.part", 900),
        info("chunks/README.md", 900),
    ]
    held = holdings(chain(4))
    held = replace(held, objects=[*held.objects, *extra])
    assert {(d.key, d.reason) for d in collectable(held, Policy(100)).objects} == {
        (extra[0].key, Reason.ORPHAN),
        (extra[1].key, Reason.ORPHAN),
        (extra[5].key, Reason.ORPHAN),
        (extra[7].key, Reason.ORPHAN),
    }


def test_what_a_newer_release_may_have_written_is_kept() -> None:
    held = holdings(chain(4))
    held = replace(held, objects=[*held.objects, *attempt_objects(3, "c" * 32, 900)], obscure={3})
    assert collectable(held, Policy(100)).objects == ()


def test_nobodys_leftovers_go() -> None:
    objects = [
        info("probes/a", 101),
        info("probes/b", 99),
        info("subscribers/gone.json", FORGOTTEN + 1),
        info("subscribers/quiet.json", FORGOTTEN - 1),
    ]
    held = holdings({}, objects=objects, temporaries=[info("a/.tmp-1", 101), info("a/.tmp-2", 99)])
    garbage = collectable(held, Policy(100))
    assert [(d.key, d.reason) for d in garbage.objects] == [
        ("a/.tmp-1", Reason.TEMPORARY),
        ("probes/a", Reason.PROBE),
        ("subscribers/gone.json", Reason.STATUS),
    ]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Holdings, Policy]:
    length = draw(st.integers(1, 9))
    ages = sorted(draw(st.lists(st.integers(0, 40), min_size=length, max_size=length)), reverse=True)
    versions, alternates = {}, {}
    for v in range(length):
        base = draw(st.sampled_from([v - 1, v - 1, v - 1, max(0, v - 2), None])) if v else None
        chunks = draw(st.integers(0 if base is not None else 1, 2))
        versions[v] = encoding(v, base, NOW - ages[v], name="a", chunks=chunks)
        if draw(st.integers(0, 3)) == 0:
            age = draw(st.integers(0, ages[v]))
            alternates[v] = encoding(v, None, NOW - age, name="b", chunks=2)
    lost = draw(
        st.sets(
            st.sampled_from([o.key for o in objects_of([*versions.values(), *alternates.values()])]),
            max_size=2,
        )
    )
    strays = [
        one
        for number in range(draw(st.integers(0, 3)))
        for one in attempt_objects(
            draw(st.integers(0, length + 1)),
            f"{number}".rjust(32, "c"),
            *draw(st.lists(st.integers(0, 40), min_size=1, max_size=2)),
        )
    ]
    leases = [
        Lease(
            f"s{n}",
            draw(st.none() | st.integers(0, length)),
            draw(st.integers(0, 10)),
            NOW - draw(st.integers(0, 40)),
        )
        for n in range(draw(st.integers(0, 2)))
    ]
    held = holdings(versions, alternates, leases=leases)
    objects = [o for o in held.objects if o.key not in lost] + strays
    policy = Policy(grace=draw(st.integers(0, 30)), keep=draw(st.integers(1, 4)))
    return replace(held, objects=objects), policy


def reachable(held: Holdings) -> set[int]:
    """Versions that a reader that holds nothing can reach, told without any idea of floors."""
    there = {o.key: o.size for o in held.objects}
    out: set[int] = set()
    for version in sorted(held.versions):
        for e in (held.versions[version], held.alternates.get(version)):
            if e is not None and e.chunks.items() <= there.items() and (e.base is None or e.base in out):
                out.add(version)
    return out


def without(held: Holdings, keys: set[str]) -> Holdings:
    return replace(held, objects=[o for o in held.objects if o.key not in keys])


@settings(deadline=None, max_examples=300)
@given(worlds())
def test_nothing_that_anybody_may_need_goes(world: tuple[Holdings, Policy]) -> None:
    held, policy = world
    after = without(held, {doomed.key for doomed in collectable(held, policy).objects})
    newest = max(held.versions)
    live = [lease for lease in held.leases if NOW - lease.seen <= max(policy.grace, 3 * lease.renew_seconds)]
    wanted = {v for v, e in held.versions.items() if NOW - e.written <= policy.grace}
    wanted |= {v for v in held.versions if v > newest - policy.keep}
    wanted |= {v for v in held.versions for lease in live if lease.needs is not None and v >= lease.needs}
    assert wanted & reachable(after) == wanted & reachable(held)
    there = {o.key for o in after.objects}
    for version in wanted:
        assert set(held.versions[version].chunks) & {o.key for o in held.objects} <= there
    # A reader that has begun on the newest whole version, or on the path to one that is not settled, can go on.
    for e in held.alternates.values():
        if NOW - e.written <= policy.grace:
            assert {o.key for o in held.objects if o.key in e.chunks} <= there


@settings(deadline=None, max_examples=300)
@given(worlds())
def test_undecided_and_young_attempts_stay(world: tuple[Holdings, Policy]) -> None:
    held, policy = world
    by_key = {o.key: o for o in held.objects}
    for doomed in collectable(held, policy).objects:
        _, version, attempt, _ = doomed.key.split("/")
        assert int(version) in held.committed
        siblings = [o for key, o in by_key.items() if key.startswith(f"chunks/{version}/{attempt}/")]
        assert min(NOW - o.modified for o in siblings) > policy.grace
        assert doomed.nbytes == by_key[doomed.key].size


@settings(deadline=None, max_examples=300)
@given(worlds())
def test_a_second_run_finds_nothing_and_the_end_of_the_log_is_enough(world: tuple[Holdings, Policy]) -> None:
    held, policy = world
    garbage = collectable(held, policy)
    again = collectable(without(held, {doomed.key for doomed in garbage.objects}), policy)
    assert again.objects == ()
    assert again.floor == garbage.floor
    if garbage.floor is not None:
        read = {v: e for v, e in held.versions.items() if v >= garbage.floor}
        assert collectable(replace(held, versions=read), policy) == garbage


@settings(deadline=None, max_examples=300)
@given(worlds(), st.data())
def test_an_interrupted_run_is_finished_by_the_next(
    world: tuple[Holdings, Policy], data: st.DataObject
) -> None:
    held, policy = world
    keys = [doomed.key for doomed in collectable(held, policy).objects]
    done = set(data.draw(st.lists(st.sampled_from(keys), unique=True))) if keys else set()
    rest = collectable(without(held, done), policy)
    assert {doomed.key for doomed in rest.objects} == set(keys) - done
