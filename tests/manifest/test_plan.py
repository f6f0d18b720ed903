"""Planning: the cheapest verified path, against exhaustive search, and everything a reader refuses."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chunkstore.memory import MemoryStore
from manifest.errors import ChainError, ForeignStream
from manifest.history import find_plan
from manifest.keys import alternate_key, manifest_key
from manifest.log import StreamInfo, VersionLog
from manifest.plan import Applied, Plan, plan
from manifest.schema import Manifest
from tests.support.faults import FaultStore
from tests.support.manifests import STREAM_ID, altered, make_alternate, make_chain, make_manifest

Log = dict[int, Manifest]


def plan_of(
    manifests: Mapping[int, Manifest] | list[Manifest],
    target: int,
    applied: Applied | Manifest | None = None,
    alternates: Log | None = None,
) -> Plan:
    by_version = manifests if isinstance(manifests, Mapping) else {m.version: m for m in manifests}
    if isinstance(applied, Manifest):
        applied = Applied(applied.version, applied.root, applied.hash)
    return plan(by_version, alternates or {}, applied, target, STREAM_ID)


def versions(found: Plan) -> list[int]:
    return [step.version for step in found.steps]


def test_deltas_from_what_is_applied() -> None:
    chain = make_chain(6)
    found = plan_of(chain, 5, chain[2])
    assert (versions(found), found.nbytes, found.from_anchor) == ([3, 4, 5], 300, False)
    assert plan_of(chain, 2, chain[2]) == Plan((), 0, False)


def test_from_nothing_through_the_newest_anchor() -> None:
    chain = make_chain(4)
    chain.append(make_manifest(4, chain[-1], nbytes=1000))
    chain.append(make_manifest(5, chain[-1], base=chain[-1]))
    found = plan_of(chain, 5)
    assert (versions(found), found.nbytes, found.from_anchor) == ([4, 5], 1100, True)


def test_an_anchor_wins_once_the_deltas_outweigh_it_and_not_before() -> None:
    chain = make_chain(12)
    chain.append(make_manifest(12, chain[-1], nbytes=1000))
    assert versions(plan_of(chain, 12, chain[1])) == [12]
    with_delta = [*chain[:12], make_manifest(12, chain[11], base=chain[11])]
    alternates = {12: make_alternate(with_delta[12], 1100)}
    assert (
        plan_of(with_delta, 12, chain[1], alternates).from_anchor is False
    )  # 1100 either way: keep what is held
    assert versions(plan_of(with_delta, 12, chain[0], alternates)) == [12]
    assert plan_of(with_delta, 12, chain[0], alternates).steps == (alternates[12],)


def test_a_delta_may_skip_versions() -> None:
    chain = make_chain(4)
    chain.append(make_manifest(4, chain[3], base=chain[1], nbytes=150))
    assert versions(plan_of(chain, 4, chain[1])) == [4]
    assert versions(plan_of(chain, 4, chain[3])) == [0, 1, 4]


def test_a_takeover_costs_nothing_and_starts_the_next_epoch() -> None:
    chain = make_chain(2)
    takeover = make_manifest(2, chain[1], base=chain[1], nbytes=0, epoch=2, publisher=b"q" * 16)
    after = make_manifest(3, takeover, base=takeover)
    found = plan_of([*chain, takeover, after], 3, chain[0])
    assert (versions(found), found.nbytes) == ([1, 2, 3], 200)


def test_a_missing_version_is_named_and_an_anchor_after_it_heals() -> None:
    """FIELD_REPORTS: modelexpress#703. Several versions behind and the middle one missing."""
    chain = make_chain(6)
    gap = {m.version: m for m in chain if m.version != 3}
    with pytest.raises(ChainError, match=manifest_key(3)):
        plan_of(gap, 5, chain[1])
    assert versions(plan_of(gap, 5, chain[3])) == [4, 5]  # the gap is behind it
    assert versions(plan_of(gap, 5, Applied(3, chain[3].root))) == [4, 5]
    healed = gap | {6: make_manifest(6, chain[5], nbytes=1000)}
    assert versions(plan_of(healed, 6, chain[1])) == [6]
    with pytest.raises(ChainError, match=manifest_key(9)):
        plan_of(chain, 9, chain[1])


def test_an_alternate_after_a_gap_heals_too() -> None:
    chain = make_chain(6)
    gap = {m.version: m for m in chain if m.version != 3}
    assert versions(plan_of(gap, 5, chain[1], {4: make_alternate(chain[4])})) == [4, 5]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parent_hash": b"x" * 32}, "parent"),
    ({"epoch": 0}, "epoch 0 is below"),
    ({"publisher": b"q" * 16}, "two publishers claim epoch 1"),
    ({"base_root": b"x" * 32}, "base root"),
    ({"catalog": b"x" * 32}, "only an anchor changes"),
    ({"base_version": 3}, "not older"),
    ({"base_version": 4}, "not older"),
    ({"version": 7}, "says it is version 7"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_a_version_that_does_not_fit_is_refused_and_blocks_every_path_through_it(
    changes: dict[str, Any], why: str
) -> None:
    chain = make_chain(3)
    bad = altered(make_manifest(3, chain[2], base=chain[2]), **changes)
    after = make_manifest(4, bad, base=make_manifest(3, chain[2], base=chain[2]), catalog=bad.catalog)
    log = {m.version: m for m in chain} | {3: bad, 4: after}
    for target in (3, 4):
        with pytest.raises(ChainError, match=f"version 3 .*{why}"):
            plan_of(log, target, chain[1])
        with pytest.raises(ChainError, match=f"version 3 .*{why}"):
            plan_of(log, target)
    healed = log | {5: make_manifest(5, after, nbytes=1000)}
    assert versions(plan_of(healed, 5, chain[1])) == [5]


def test_a_cycle_is_refused() -> None:
    chain = make_chain(2)
    a = altered(make_manifest(2, chain[1], base=chain[1]), base_version=3)
    b = make_manifest(3, a, base=a)
    with pytest.raises(ChainError, match=r"version 2 .*not older"):
        plan_of({1: chain[1], 2: a, 3: b}, 3)
    with pytest.raises(ValidationError):
        make_manifest(2, chain[1], base=make_manifest(3))


def test_an_anchor_may_change_the_catalog_and_a_refused_anchor_is_no_start() -> None:
    chain = make_chain(2)
    anchor = make_manifest(2, chain[1], catalog=b"n" * 32)
    assert versions(plan_of([*chain, anchor], 2, chain[1])) == [2]
    with pytest.raises(ChainError, match=r"version 2 .*parent"):
        plan_of([*chain, altered(anchor, parent_hash=b"x" * 32)], 2, chain[1])


def test_foreign_streams_are_refused_even_beside_the_path() -> None:
    chain = make_chain(4)
    foreign = altered(chain[1], stream=b"f" * 16)
    with pytest.raises(ForeignStream, match="version 1"):
        plan_of([chain[0], foreign, *chain[2:]], 3, chain[2])
    with pytest.raises(ForeignStream, match="version 2"):
        plan_of(chain, 3, chain[2], {2: altered(make_alternate(chain[2]), stream=b"f" * 16)})


def test_what_is_held_must_be_what_the_log_says() -> None:
    """A base root or hash that differs is never a start; without an anchor nothing is."""
    chain = make_chain(4)
    late = {m.version: m for m in chain[1:]}
    for wrong, why in [
        (Applied(1, b"x" * 32), "root digest differs"),
        (Applied(1, chain[1].root, b"x" * 32), "not the one that was applied"),
        (Applied(0, chain[0].root, b"x" * 32), "not the one that was applied"),
    ]:
        with pytest.raises(ChainError, match=why):
            plan_of(late, 3, wrong)
        if wrong.version:
            assert versions(plan_of(chain, 3, wrong)) == [0, 1, 2, 3]
    with pytest.raises(ChainError):
        plan_of(late, 3, Applied(0, b"x" * 32))
    assert versions(plan_of(late, 3, Applied(0, chain[0].root, chain[0].hash))) == [1, 2, 3]


def test_versions_never_go_down() -> None:
    """FIELD_REPORTS: marin#1829. An older target is refused, not applied backwards; the train step decides nothing."""
    chain = make_chain(3)
    restarted = make_manifest(3, altered(chain[2], train_step=900), base=chain[2], train_step=0)
    assert versions(plan_of([*chain[:2], altered(chain[2], train_step=900), restarted], 3, chain[1])) == [
        2,
        3,
    ]
    with pytest.raises(ChainError, match="never go down"):
        plan_of(chain, 1, chain[2])


@pytest.mark.parametrize(
    "changes",
    [
        {"root": b"x" * 32},
        {"catalog": b"x" * 32},
        {"parent_hash": b"x" * 32},
        {"digests": bytes(8)},
        {"kind": "delta"},
    ],
)
def test_an_alternate_that_is_not_the_same_weights_is_ignored(changes: dict[str, Any]) -> None:
    chain = make_chain(3)
    bad = altered(make_alternate(chain[2], nbytes=1), **changes)
    assert versions(plan_of(chain, 2, alternates={2: bad})) == [0, 1, 2]


@st.composite
def logs(draw: st.DrawFn) -> tuple[Log, Log, Applied | None, int]:
    """A log of up to 7 versions, mostly sound: deltas of any span, anchors, alternates, gaps, breaks."""
    chain: list[Manifest] = []
    for version in range(draw(st.integers(1, 7))):
        parent = chain[-1] if chain else None
        base = draw(st.sampled_from([None, *chain, *chain[-1:] * 4])) if chain else None
        made = make_manifest(version, parent, base=base, nbytes=draw(st.integers(1, 9)))
        breaks: dict[str, Any] = {"parent_hash": b"x" * 32} if version else {}
        if base is not None:
            breaks = draw(st.sampled_from([breaks, {"base_root": b"x" * 32}, {"catalog": b"x" * 32}]))
        chain.append(altered(made, **breaks) if draw(st.integers(0, 9)) == 0 else made)
    target = len(chain) - 1
    alternates = {
        m.version: make_alternate(m, draw(st.integers(1, 30)))
        for m in chain[1:]
        if draw(st.integers(0, 3)) == 0
    }
    held = draw(st.none() | st.sampled_from(chain))
    applied = None
    if held is not None:
        root = held.root if draw(st.integers(0, 5)) else b"x" * 32
        applied = Applied(held.version, root, draw(st.sampled_from([None, held.hash])))
    gaps = {m.version for m in chain[:-1] if draw(st.integers(0, 9)) == 0}
    return {m.version: m for m in chain if m.version not in gaps}, alternates, applied, target


def sound(log: Log, version: int) -> bool:
    m = log.get(version)
    if m is None:
        return False
    parent, base = log.get(version - 1), log.get(m.base_version if m.base_version is not None else -1)
    return (parent is None or m.parent_hash == parent.hash) and (
        base is None or (m.base_root, m.catalog) == (base.root, base.catalog)
    )


def brute_force(log: Log, alternates: Log, applied: Applied | None, target: int) -> int | None:
    """Bytes of the cheapest path by trying all: each start, each next step; judged step by step."""

    def sound_after(version: int) -> bool:
        return all(sound(log, v) for v in range(version + 1, target + 1))

    def onward(version: int, root: bytes, spent: int) -> list[int]:
        if version == target:
            return [spent]
        out: list[int] = []
        for m in log.values():
            if m.base_version == version and m.base_root == root and m.version <= target:
                out += onward(m.version, m.root, spent + m.nbytes)
        return out

    costs: list[int] = []
    if applied is not None and sound_after(applied.version):
        own, child = log.get(applied.version), log.get(applied.version + 1)
        known = own.hash if own is not None else child.parent_hash if child is not None else None
        same = applied.manifest_hash is None or known is None or known == applied.manifest_hash
        if same and (own is None or own.root == applied.root):
            costs += onward(applied.version, applied.root, 0)
    for m in log.values():
        if sound(log, m.version) and sound_after(m.version):
            starts = [m] if m.kind == "anchor" else []
            starts += [alternates[m.version]] if m.version in alternates else []
            for start in starts:
                costs += onward(m.version, m.root, start.nbytes)
    return min(costs, default=None)


def check_steps(applied: Applied | None, target: int, found: Plan) -> None:
    assert found.nbytes == sum(m.nbytes for m in found.steps)
    state = (applied.version, applied.root) if applied is not None else None
    for step in found.steps:
        assert step.kind == "anchor" or state == (step.base_version, step.base_root)
        state = (step.version, step.root)
    assert state is not None
    assert state[0] == target


@given(logs())
def test_plans_are_the_cheapest_there_are(case: tuple[Log, Log, Applied | None, int]) -> None:
    log, alternates, applied, target = case
    try:
        found = plan(log, alternates, applied, target, STREAM_ID)
    except ChainError:
        assert brute_force(*case) is None
    else:
        assert found.nbytes == brute_force(*case)
        check_steps(applied, target, found)


@given(logs())
def test_reading_back_from_the_target_finds_a_plan_whenever_there_is_one(
    case: tuple[Log, Log, Applied | None, int],
) -> None:
    manifests, alternates, applied, target = case
    store = MemoryStore()
    for version, m in manifests.items():
        store.put(manifest_key(version), m.data)
    for version, m in alternates.items():
        store.put(alternate_key(version), m.data)
    log = VersionLog(store, StreamInfo(STREAM_ID))
    try:
        found = find_plan(log, applied, target)
    except ChainError:
        assert brute_force(*case) is None
    else:
        check_steps(applied, target, found)
        assert brute_force(*case) is not None
        first = found.steps[0].version if found.steps else target + 1
        assert all(sound(manifests, version) for version in range(first, target + 1))


def log_of(chain: list[Manifest]) -> VersionLog:
    store = MemoryStore()
    for m in chain:
        store.put(manifest_key(m.version), m.data)
    return VersionLog(store, StreamInfo(STREAM_ID))


def test_reading_stops_where_the_deltas_outweigh_an_anchor() -> None:
    """A reader far behind does not read the whole log, one that is close reads past an anchor."""
    chain = make_chain(40)
    chain.append(make_manifest(40, chain[-1], nbytes=500))
    chain.append(make_manifest(41, chain[-1], base=chain[-1]))

    def too_far(_: str, key: str) -> Exception | None:
        return AssertionError(key) if key < manifest_key(38) else None

    log = VersionLog(FaultStore(log_of(chain).store, before=too_far), StreamInfo(STREAM_ID))
    assert versions(find_plan(log, Applied(3, chain[3].root), 41)) == [40, 41]
    assert versions(find_plan(log, None, 41)) == [40, 41]
    close = make_chain(6)
    log = log_of(close)
    log.put_alternate(make_alternate(close[5], nbytes=900))
    assert versions(find_plan(log, Applied(2, close[2].root), 5)) == [3, 4, 5]


def test_an_anchor_is_a_start_only_if_it_fits_what_is_below_it() -> None:
    """So one version more is read than the path needs: whoever was fenced off may have written the anchor."""
    chain = make_chain(3)
    overtaken = make_manifest(3, chain[-1], epoch=0)
    log = log_of([*chain, overtaken, make_manifest(4, overtaken, base=overtaken)])
    for applied in (None, Applied(1, chain[1].root)):
        with pytest.raises(ChainError, match="its epoch 0 is below its parent's 1"):
            find_plan(log, applied, 4)


@pytest.mark.parametrize("beside", ["an anchor", "an alternate", "what is held"])
def test_a_version_whose_base_is_another_than_it_says_is_refused_however_old_its_base_is(beside: str) -> None:
    """Whether a version is refused never depends on how much of the log a reader needed."""
    chain = make_chain(4)
    bad = altered(make_manifest(4, chain[3], base=chain[1]), base_root=b"x" * 32)
    if beside == "an alternate":
        log = log_of([*chain, bad])
        log.put_alternate(make_alternate(bad, nbytes=1))
        target, applied = 4, None
    else:
        start = chain[3] if beside == "what is held" else make_manifest(3, chain[2], nbytes=1)
        bad = altered(bad, parent_hash=start.hash)
        log = log_of([*chain[:3], start, bad, make_manifest(5, bad, base=start)])
        target, applied = 5, Applied(3, start.root) if beside == "what is held" else None
    with pytest.raises(ChainError, match=r"version 4 .*base root"):
        find_plan(log, applied, target)


def test_a_path_never_uses_what_cannot_be_had() -> None:
    """FIELD_REPORTS: grail 9d3c9fa. Plan on the newest anchor that is complete, in whatever order they were stored."""
    chain = make_chain(4)
    chain.append(make_manifest(4, chain[3], nbytes=300))
    chain.append(make_manifest(5, chain[4], base=chain[4]))
    log = log_of(chain)
    log.put_alternate(make_alternate(chain[3], nbytes=200))
    assert versions(find_plan(log, None, 4)) == [4]
    with pytest.raises(ChainError, match="no usable anchor"):
        find_plan(log, None, 4, {chain[4].hash})  # nothing leads over an anchor that is lost
    assert find_plan(log, None, 3).nbytes == 200
    assert versions(find_plan(log, None, 3, {make_alternate(chain[3], nbytes=200).hash})) == [0, 1, 2, 3]
    applied = Applied(1, chain[1].root)
    assert versions(find_plan(log, Applied(0, chain[0].root), 3)) == [3]
    log = log_of(chain)
    assert versions(find_plan(log, applied, 3)) == [2, 3]
    with pytest.raises(ChainError):
        find_plan(log, applied, 3, {chain[2].hash})
    log.put_alternate(make_alternate(chain[2], nbytes=2000))
    assert find_plan(log, applied, 3, {chain[2].hash}).nbytes == 2100
