"""Compaction: an anchor of any version, built from the store alone, proved before it is one."""

import itertools
from pathlib import Path

import pytest

from chunkstore.errors import ConfigError, CorruptObject, ObjectMissing
from chunkstore.memory import MemoryStore
from manifest.collect import delete_garbage, read_holdings
from manifest.gc import Policy, collectable
from manifest.history import find_plan
from manifest.keys import CHUNKS
from manifest.log import VersionLog
from manifest.plan import alternate_refusal
from manifest.signing import Signer
from manifest.verify import verify_stream
from publisher.compact import compact
from publisher.errors import CompactionLate
from tests.support.faults import FaultStore
from tests.support.streams import StreamBuilder, random_weights

SHAPES = {"a": (4, 5), "b": (7,), "c": (0, 3), "d": (), "e": (3, 3)}
DTYPES = {"e": "F32"}
GRACE = 3600.0


@pytest.fixture
def stream() -> StreamBuilder:
    """Versions 0 … 6: deltas, one of them a takeover."""
    built = StreamBuilder(MemoryStore(), random_weights(SHAPES, DTYPES), per_chunk=2)
    built.train(0.3, steps=2)
    built.takeover(b"another-publish!")
    built.train(0.3, steps=3)
    return built


def chunk_keys(stream: StreamBuilder) -> set[str]:
    return {info.key for info in stream.store.list_after(CHUNKS)}


@pytest.mark.parametrize("version", [1, 3, 6])
def test_any_version_can_be_stored_whole(stream: StreamBuilder, version: int, tmp_path: Path) -> None:
    anchor = compact(stream.log, version, GRACE, scratch=tmp_path)
    assert stream.log.read_alternate(version) == anchor
    assert alternate_refusal(anchor, stream.manifests[version]) is None
    assert list(tmp_path.iterdir()) == []
    report = verify_stream(stream.store)
    assert (report.problems, report.alternates) == ((), 1)
    for manifest in stream.manifests[: version + 1]:
        for ref in manifest.chunks:
            stream.store.delete(ref.key)
    assert verify_stream(stream.store).unverified == ()


def test_what_is_whole_is_left_as_it_is(stream: StreamBuilder) -> None:
    first = compact(stream.log, 4, GRACE)
    before = chunk_keys(stream)
    assert compact(stream.log, 4, GRACE) == first
    assert compact(stream.log, 0, GRACE) == stream.manifests[0]
    assert chunk_keys(stream) == before
    stream.store.delete(first.chunks[0].key)
    with pytest.raises(ObjectMissing, match="compact another version"):
        compact(stream.log, 4, GRACE)


def test_two_at_a_time_end_with_one_anchor(stream: StreamBuilder) -> None:
    def race(operation: str, key: str) -> None:
        if operation == "put_if_absent":
            compact(stream.log, 6, GRACE)

    log = VersionLog(FaultStore(stream.store, before=race), stream.log.stream)
    assert compact(log, 6, GRACE) == stream.log.read_alternate(6)
    assert verify_stream(stream.store).ok


def test_it_gives_up_past_half_of_the_grace_period(stream: StreamBuilder) -> None:
    for allowed in itertools.count():
        ticks = itertools.count()
        try:
            compact(stream.log, 6, 2 * allowed, clock=lambda ticks=ticks: next(ticks))  # type: ignore[misc]
        except CompactionLate:
            assert stream.log.read_alternate(6) is None
        else:
            break
    assert allowed > 5


def test_an_anchor_that_became_late_while_it_was_proved_is_not_put(stream: StreamBuilder) -> None:
    """After the last object was read back: garbage collection may have begun to take it for left behind."""
    before = chunk_keys(stream)
    read: set[str] = set()

    def after(operation: str, key: str) -> None:
        if operation == "get":
            read.add(key)

    def clock() -> float:
        uploaded = chunk_keys(stream) - before
        return GRACE if uploaded and uploaded <= read else 0.0

    log = VersionLog(FaultStore(stream.store, after=after), stream.log.stream)
    with pytest.raises(CompactionLate):
        compact(log, 6, GRACE, clock=clock)
    assert chunk_keys(stream) > before
    assert stream.log.read_alternate(6) is None


def test_a_chunk_that_was_stored_wrong_makes_no_anchor(stream: StreamBuilder) -> None:
    before = chunk_keys(stream)

    class Bad(FaultStore):
        def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
            damaged = bytearray(data)
            damaged[-1] ^= 1
            super().put(key, damaged)

    log = VersionLog(Bad(stream.store), stream.log.stream)
    with pytest.raises(CorruptObject):
        compact(log, 6, GRACE)
    assert stream.log.read_alternate(6) is None
    assert chunk_keys(stream) > before, "left for garbage collection"


def test_a_version_that_cannot_be_rebuilt_makes_no_anchor(stream: StreamBuilder) -> None:
    stream.store.delete(stream.manifests[2].chunks[0].key)
    with pytest.raises(ObjectMissing):
        compact(stream.log, 6, GRACE)
    assert stream.log.read_alternate(6) is None


def test_the_cheaper_path_may_vanish_while_it_is_read(stream: StreamBuilder) -> None:
    compact(stream.log, 3, GRACE)
    first = find_plan(stream.log, None, 6).steps[0].chunks

    def vanish(operation: str, key: str) -> None:
        if operation == "get" and key == first[0].key:
            stream.store.delete(key)

    log = VersionLog(FaultStore(stream.store, before=vanish), stream.log.stream)
    assert compact(log, 6, GRACE).version == 6
    assert verify_stream(stream.store).unverified == ()


def test_a_signed_stream_gets_a_signed_anchor_or_none() -> None:
    signer, _ = Signer.generate()
    stream = StreamBuilder(MemoryStore(), random_weights(SHAPES, DTYPES), signer=signer)
    stream.train(0.3)
    with pytest.raises(ConfigError, match="signed"):
        compact(stream.log, 1, GRACE)
    log = VersionLog(stream.store, stream.log.stream, trust=signer.trust, signer=signer)
    assert compact(log, 1, GRACE).signature is not None
    assert verify_stream(stream.store, trust=signer.trust).ok


def test_a_running_compaction_is_safe_from_garbage_collection(stream: StreamBuilder) -> None:
    """Its chunks are nobody's until the anchor names them; their age protects them."""
    policy = Policy(GRACE)

    def collect(operation: str, key: str) -> None:
        if operation == "put_if_absent":
            delete_garbage(stream.store, collectable(read_holdings(stream.log, policy), policy).objects)

    log = VersionLog(FaultStore(stream.store, before=collect), stream.log.stream)
    compact(log, 6, GRACE)
    assert verify_stream(stream.store).problems == ()
