"""Garbage collection over real streams: what is read, what is deleted, and who can still read afterwards."""

from pathlib import Path

import pytest

from chunkstore.errors import ObjectMissing, StoreUnavailable
from chunkstore.memory import MemoryStore
from chunkstore.posix import PosixStore
from chunkstore.store import Store
from manifest.collect import delete_garbage, read_holdings
from manifest.export import export_checkpoint
from manifest.gc import Garbage, Policy, collectable
from manifest.history import find_plan
from manifest.keys import ALTERNATES, CHUNKS, alternate_key, chunk_key, manifest_key, status_key
from manifest.log import VersionLog
from manifest.verify import verify_stream
from tests.support.faults import FaultStore
from tests.support.streams import StreamBuilder, random_weights

SHAPES = {"a": (4, 5), "b": (7,), "e": (3, 3)}
POLICY = Policy(grace=100)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream(clock: Clock) -> StreamBuilder:
    """Versions 0 … 8, with an alternate of 5, all older than the grace period."""
    built = StreamBuilder(MemoryStore(clock=clock), random_weights(SHAPES), per_chunk=1)
    built.train(0.3, steps=3)
    built.takeover(b"another-publish!")
    built.train(0.3, steps=4)
    built.alternate(5)
    clock.now += 1000
    return built


def look(log: VersionLog, policy: Policy = POLICY) -> Garbage:
    return collectable(read_holdings(log, policy), policy)


def collect(log: VersionLog, policy: Policy = POLICY) -> Garbage:
    garbage = look(log, policy)
    delete_garbage(log.store, garbage.objects)
    return garbage


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list_after("")}


def test_old_versions_go_and_everything_from_the_anchor_on_can_be_restored(
    stream: StreamBuilder, tmp_path: Path
) -> None:
    before = keys(stream.store)
    garbage = collect(stream.log)
    assert garbage.floor == 5
    gone = before - keys(stream.store)
    assert gone == {doomed.key for doomed in garbage.objects}
    assert gone == {c.key for m in stream.manifests[:5] for c in m.chunks}
    for version in range(5, 9):
        exported = export_checkpoint(stream.store, version, tmp_path / str(version))
        assert exported.root == stream.manifests[version].root
    with pytest.raises(ObjectMissing):
        export_checkpoint(stream.store, 4, tmp_path / "4")
    assert collect(stream.log).objects == ()


def test_what_it_leaves_is_a_sound_stream(stream: StreamBuilder) -> None:
    collect(stream.log)
    report = verify_stream(stream.store)
    assert report.problems == ()
    assert report.collected == (0, 1, 2, 3, 4)
    assert report.unverified == ()
    stream.store.delete(stream.manifests[7].chunks[0].key)
    report = verify_stream(stream.store)
    assert [problem.key for problem in report.problems] == [stream.manifests[7].chunks[0].key]
    assert (report.collected, report.unverified) == ((0, 1, 2, 3, 4), (7, 8))


def test_a_damaged_old_version_is_not_taken_for_a_collected_one(stream: StreamBuilder) -> None:
    stream.store.put(stream.manifests[1].chunks[0].key, b"junk")
    report = verify_stream(stream.store)
    assert [problem.kind for problem in report.problems] == ["corrupt_object"]
    assert (report.collected, report.unverified) == ((), (1, 2, 3, 4))


def test_only_as_much_of_the_log_is_read_as_the_answer_takes(stream: StreamBuilder) -> None:
    read: list[str] = []

    def seen(operation: str, key: str) -> None:
        if operation == "get":
            read.append(key)

    log = VersionLog(FaultStore(stream.store, before=seen), stream.log.stream)
    assert look(log) == look(stream.log)
    assert set(read) == {manifest_key(v) for v in range(4, 9)} | {alternate_key(5)}


def test_a_lease_is_read_from_the_status_object(stream: StreamBuilder, clock: Clock) -> None:
    status = '{"stream": "%s", "applied_version": 3, "needs_version": 3, "renew_seconds": 30}'
    stream.store.put(status_key("worker"), (status % stream.log.stream.id.hex()).encode())
    assert look(stream.log).floor == 0
    stream.store.put(status_key("worker"), (status % ("f" * 32)).encode())
    assert look(stream.log).floor == 5, "a lease on another stream that lay here"
    stream.store.put(status_key("worker"), b"{}")
    assert look(stream.log).floor == 0, "what cannot be understood may be a lease"
    clock.now += 101
    assert look(stream.log).floor == 5


def test_a_clock_that_is_hours_off_changes_nothing(
    stream: StreamBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = look(stream.log)
    monkeypatch.setattr("time.time", lambda: 1e12)
    assert look(stream.log) == expected


def test_a_log_that_cannot_be_read_or_followed_frees_nothing(stream: StreamBuilder) -> None:
    manifest = stream.manifests[8]
    lie = manifest.model_copy(update={"parent_hash": b"x" * 32})
    stream.store.put(manifest_key(8), lie.data)
    assert look(stream.log).objects == ()
    stream.store.put(manifest_key(8), manifest.data)
    stream.store.put(manifest_key(6), b"from a newer release")
    assert look(stream.log).objects == ()
    stream.store.put(manifest_key(6), stream.manifests[6].data)
    assert look(stream.log).floor == 5
    stream.store.put(alternate_key(5), b"from a newer release")
    assert look(stream.log).objects == ()


def test_a_run_that_fails_in_the_middle_is_taken_up_again(stream: StreamBuilder) -> None:
    garbage = look(stream.log)
    left = 5

    def fail(operation: str, key: str) -> Exception | None:
        nonlocal left
        left -= operation == "delete"
        return StoreUnavailable("503") if left < 0 else None

    with pytest.raises(StoreUnavailable):
        delete_garbage(FaultStore(stream.store, before=fail), garbage.objects)
    rest = collect(stream.log)
    assert 0 < len(rest.objects) < len(garbage.objects)
    assert verify_stream(stream.store).ok


def test_a_path_that_was_cheaper_and_is_gone_is_gone_around(clock: Clock, tmp_path: Path) -> None:
    stream = StreamBuilder(MemoryStore(clock=clock), random_weights(SHAPES))
    stream.takeover(b"another-publish!")
    stream.takeover(b"a-third-publishe")
    stream.per_chunk = 1  # more chunks, more bytes
    stream.alternate(1)
    clock.now += 1000
    assert find_plan(stream.log, None, 2).steps[0].version == 0
    assert collect(stream.log).floor == 1
    assert find_plan(stream.log, None, 2).steps[0].version == 0, "nothing tells a planner"
    assert export_checkpoint(stream.store, 2, tmp_path / "2").root == stream.manifests[2].root


def test_leftovers_on_a_file_system(tmp_path: Path) -> None:
    stream = StreamBuilder(PosixStore(tmp_path), random_weights(SHAPES))
    for name in ("versions/.tmp-1", "chunks/.tmp-2"):
        (tmp_path / name).write_bytes(b"half")
    assert look(stream.log, Policy(3600)).objects == ()
    garbage = collect(stream.log, Policy(-3600))
    assert [doomed.key for doomed in garbage.objects] == ["chunks/.tmp-2", "versions/.tmp-1"]
    assert list(stream.store.temporaries()) == []
    assert verify_stream(stream.store).ok


def test_an_empty_stream(clock: Clock) -> None:
    stream = StreamBuilder(MemoryStore(clock=clock), random_weights(SHAPES))
    stream.store.delete(manifest_key(0))
    clock.now += 1000
    assert look(stream.log) == Garbage((), None, None)
    assert list(stream.store.list_after(ALTERNATES)) == []
    assert list(stream.store.list_after(CHUNKS))


def test_a_slow_look_makes_nothing_older(stream: StreamBuilder, clock: Clock) -> None:
    """What is young when it begins is left alone, however long the listings take."""
    orphan = chunk_key(7, bytes(16), 0, 0)
    stream.store.put(orphan, b"x")
    clock.now += POLICY.grace - 20

    def slow(operation: str, key: str) -> None:
        clock.now += 10

    began = clock.now
    log = VersionLog(FaultStore(stream.store, before=slow), stream.log.stream)
    assert orphan not in {doomed.key for doomed in look(log).objects}
    assert clock.now - began > 2 * POLICY.grace
    assert orphan in {doomed.key for doomed in look(log).objects}
