"""The version log: commits whose replies are lost, racing writers, reading, hostile objects."""

import itertools
import threading
from dataclasses import dataclass

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkstore.errors import (
    AccessDenied,
    CorruptObject,
    DeltasyncError,
    FormatUnsupported,
    LimitExceeded,
    ObjectMissing,
    StoreFull,
    StoreUnavailable,
)
from chunkstore.memory import MemoryStore
from chunkstore.store import Buffer
from manifest.catalog import Catalog, TensorSpec
from manifest.errors import ChainError, CommitUnknown, ForeignStream, ManifestInvalid
from manifest.keys import STREAM, alternate_key, catalog_key, manifest_key
from manifest.log import (
    StreamInfo,
    VersionLog,
    create_or_open_stream,
    open_stream,
    put_catalog,
    read_catalog,
)
from manifest.schema import MAX_MANIFEST_BYTES, Manifest
from manifest.settle import Patience, settle
from tests.manifest.lossy import Fault, LossyStore
from tests.support.manifests import STREAM_ID, altered, make_alternate, make_chain, make_manifest

INFO = StreamInfo(STREAM_ID)


@dataclass
class FakeTime:
    """A clock that moves only when someone sleeps."""

    now: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, deadline: float = 60.0) -> Patience:
        return Patience(deadline, clock=lambda: self.now, sleep=self.sleep)


def log_over(store: MemoryStore | LossyStore, deadline: float = 60.0) -> VersionLog:
    return VersionLog(store, INFO, FakeTime().patience(deadline))


def filled(manifests: list[Manifest]) -> tuple[MemoryStore, VersionLog]:
    store = MemoryStore()
    log = log_over(store)
    for manifest in manifests:
        assert log.commit(manifest).won
    return store, log


def test_first_commit_wins_and_second_learns_the_winner() -> None:
    log = log_over(MemoryStore())
    mine, theirs = make_manifest(0, salt="mine"), make_manifest(0, salt="theirs")
    assert log.commit(theirs).won
    outcome = log.commit(mine)
    assert not outcome.won
    assert outcome.winner == theirs
    assert log.commit(theirs).won  # asking again changes nothing


@pytest.mark.parametrize("fault", [Fault.TAKEN, Fault.AFTER, Fault.BEFORE])
def test_one_lost_reply_is_settled_by_reading_back(fault: Fault) -> None:
    """FIELD_REPORTS: aws-sdk-java-v2#6580, hudi#14373. One's own retried put that answers 412 is a win."""
    store = LossyStore(MemoryStore(), [fault])
    manifest = make_manifest(0)
    assert log_over(store).commit(manifest).won
    assert {data for _, data in store.puts} <= {manifest.data}


def test_unknown_at_the_deadline_and_known_when_asked_again() -> None:
    below = MemoryStore()
    time = FakeTime()
    store = LossyStore(below, itertools.chain([Fault.AFTER], itertools.repeat(Fault.BEFORE)))
    manifest = make_manifest(0)
    with pytest.raises(CommitUnknown, match=manifest_key(0)):
        VersionLog(store, INFO, time.patience(30)).commit(manifest)
    assert 30 <= time.now < 40
    assert log_over(below).commit(manifest).won  # the first put had landed
    assert not log_over(below).commit(make_manifest(0, salt="other")).won


def test_denied_outright_is_no_commit_but_denied_after_doubt_is_unknown() -> None:
    with pytest.raises(AccessDenied):
        log_over(LossyStore(MemoryStore(), [Fault.DENIED])).commit(make_manifest(0))
    doubtful = itertools.chain([Fault.BEFORE, Fault.BEFORE], itertools.repeat(Fault.DENIED))
    with pytest.raises(CommitUnknown):
        log_over(LossyStore(MemoryStore(), doubtful)).commit(make_manifest(0))


class _FullAfterLink(MemoryStore):
    """A disk that is full when the directory is synced, after the name was linked."""

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        super().put_if_absent(key, data)
        raise StoreFull(f"put_if_absent {self.url}/{key}: no space")


def test_a_refusal_after_the_effect_is_a_win() -> None:
    assert log_over(_FullAfterLink()).commit(make_manifest(0)).won


@given(st.data())
def test_commit_never_says_the_opposite_of_the_truth(data: st.DataObject) -> None:
    """Two writers over one store, every call of each under its own faults: at most one wins, and it is the
    holder.
    """
    below = MemoryStore()
    faults = st.lists(st.sampled_from(Fault), max_size=12)
    forever = data.draw(st.sampled_from([Fault.NONE, Fault.BEFORE, Fault.DENIED]))
    manifests = [make_manifest(0, salt=name) for name in ("a", "b")]
    turn = data.draw(st.integers(0, 3))
    puts = itertools.count()
    told: dict[str, object] = {}

    def rival() -> None:
        if next(puts) == turn:
            told["b"] = attempt(manifests[1], data.draw(faults))

    def attempt(manifest: Manifest, script: list[Fault], before_put: object = None) -> object:
        endless = itertools.chain(script, itertools.repeat(forever))
        store = LossyStore(below, endless, rival if before_put else None)
        try:
            return log_over(store, deadline=3).commit(manifest)
        except (CommitUnknown, AccessDenied) as error:
            return error

    told["a"] = attempt(manifests[0], data.draw(faults), before_put=True)
    held = log_over(below).read(0)
    for name, manifest in zip("ab", manifests, strict=True):
        answer = told.get(name)
        if isinstance(answer, AccessDenied):
            assert held != manifest
        elif answer is not None and not isinstance(answer, CommitUnknown):
            assert answer.won == (held == manifest)  # type: ignore[attr-defined]
            assert answer.winner == held  # type: ignore[attr-defined]


def test_threads_racing_for_every_version_each_have_exactly_one_winner() -> None:
    store = MemoryStore()
    wins: list[tuple[int, int]] = []
    start = threading.Barrier(4)

    def race(writer: int) -> None:
        log = log_over(store)
        for version in range(50):
            start.wait()
            if log.commit(make_manifest(version, salt=writer)).won:
                wins.append((version, writer))

    threads = [threading.Thread(target=race, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(version for version, _ in wins) == list(range(50))


def test_read_tail_newest_exists() -> None:
    chain = make_chain(5)
    store, log = filled(chain[:4])
    assert log.read(2) == chain[2]
    assert log.read(4) is None
    assert [m.version for m in log.tail(1)] == [2, 3]
    assert log.newest() == chain[3]
    assert log.newest(after=3) is None
    assert log.exists(3)
    assert not log.exists(4)
    assert list(log.versions(after=1)) == [2, 3]
    with pytest.raises(ObjectMissing, match=manifest_key(4)):
        log.read_required(4)
    assert log_over(MemoryStore()).newest() is None
    log.commit(chain[4])
    assert log.newest() == chain[4]  # nothing is cached
    store.delete(manifest_key(4))
    assert log.newest() == chain[3]


def test_newest_ignores_what_is_no_version() -> None:
    store, log = filled(make_chain(2))
    store.put("versions/readme", b"")
    store.put("versions/9", b"")
    assert log.newest() == log.read(1)


def test_foreign_and_misplaced_manifests_are_refused() -> None:
    store, log = filled(make_chain(2))
    foreign = make_manifest(2, stream=b"f" * 16)
    store.put(manifest_key(2), foreign.data)
    with pytest.raises(ForeignStream, match=manifest_key(2)):
        log.read(2)
    with pytest.raises(ForeignStream):
        log.commit(make_manifest(2))
    with pytest.raises(ForeignStream):
        log.commit(foreign)
    for found in (2, 4):
        store.put(manifest_key(3), make_manifest(found).data)
        with pytest.raises(ManifestInvalid, match=f"version {found}"):
            log.read(3)


def test_reads_and_commits_are_bounded() -> None:
    store, log = filled([])
    store.put(manifest_key(0), bytes(MAX_MANIFEST_BYTES + 1))
    with pytest.raises(ManifestInvalid, match=f"limit of {MAX_MANIFEST_BYTES}"):
        log.read(0)
    with pytest.raises(LimitExceeded):
        log.commit(make_manifest(0))
    with pytest.raises(LimitExceeded):
        settle(store, "x", b"12345", limit=4, patience=Patience())
    assert store.head("x") is None


def test_alternates() -> None:
    chain = make_chain(4)
    _, log = filled(chain)
    alternate = make_alternate(chain[2])
    assert log.put_alternate(alternate).won
    other = log.put_alternate(make_alternate(chain[2], nbytes=7))
    assert not other.won
    assert other.winner == log.read_alternate(2) == alternate
    assert log.read_alternate(3) is None
    assert log.alternates() == [2]
    assert log.alternates(after=2) == []
    with pytest.raises(ChainError, match="version 3"):
        log.put_alternate(make_alternate(chain[3], root=b"r" * 32))
    with pytest.raises(ObjectMissing):
        log.put_alternate(make_alternate(make_manifest(9)))


def test_stray_objects_are_no_alternates() -> None:
    store, log = filled(make_chain(2))
    store.put(alternate_key(1) + "-copy", b"")
    store.put("alternates/1/anchor", b"")
    assert log.alternates() == []


def test_streams_are_created_once() -> None:
    """Racing creators, one of them with a lost reply, all end up in the same stream."""
    store = MemoryStore()
    with pytest.raises(ObjectMissing, match="no stream"):
        open_stream(store)
    lossy = LossyStore(store, [Fault.NONE, Fault.AFTER])
    created = create_or_open_stream(lossy, FakeTime().patience())
    assert created == create_or_open_stream(store) == open_stream(store)
    assert len(created.id) == 16
    assert create_or_open_stream(MemoryStore()) != created


@pytest.mark.parametrize("fault", list(Fault))
def test_a_stream_appearing_while_it_is_created_is_opened(fault: Fault) -> None:
    store = MemoryStore()
    made: list[StreamInfo] = []
    faulty = LossyStore(
        store, [Fault.NONE, fault], lambda: made.append(create_or_open_stream(store)) if not made else None
    )
    try:
        assert create_or_open_stream(faulty, FakeTime().patience()) == open_stream(store)
    except AccessDenied:
        assert fault is Fault.DENIED


def test_hostile_stream_records() -> None:
    store = MemoryStore()
    store.put(STREAM, msgpack.packb({"format": 2, "stream": bytes(16)}))
    with pytest.raises(FormatUnsupported):
        open_stream(store)
    for data in (b"", b"\xc1", msgpack.packb([]), msgpack.packb({"format": 1, "stream": b"short"})):
        store.put(STREAM, data)
        with pytest.raises(ManifestInvalid):
            open_stream(store)
        with pytest.raises(ManifestInvalid):
            create_or_open_stream(store)


def test_catalogs_are_stored_under_their_hash_and_checked() -> None:
    store = MemoryStore()
    catalog = Catalog.of([TensorSpec("w", "BF16", (2, 3))], {"tied": "w"})
    put_catalog(store, catalog)
    put_catalog(store, catalog)
    assert read_catalog(store, catalog.hash) == catalog
    store.put(catalog_key(catalog.hash), catalog.data[:-1])
    with pytest.raises(CorruptObject, match=catalog.hash.hex()):
        read_catalog(store, catalog.hash)
    with pytest.raises(CorruptObject, match=catalog.hash.hex()):
        put_catalog(store, catalog)
    with pytest.raises(ObjectMissing):
        read_catalog(store, bytes(32))


@given(st.data())
def test_mutated_manifests_raise_only_typed_errors(data: st.DataObject) -> None:
    chain = make_chain(2)
    raw = bytearray(chain[1].data)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        parsed = Manifest.from_bytes(bytes(raw), name="versions/1")
    except DeltasyncError:
        return
    assert parsed.data == bytes(raw)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=40)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.binary(), inner, max_size=4),
)


@given(JUNK, st.sampled_from(sorted(Manifest.model_fields)))
def test_junk_in_place_of_a_field_raises_only_typed_errors(junk: object, field: str) -> None:
    data = msgpack.packb({**make_chain(2)[1].model_dump(), field: junk})
    for hostile in (data, msgpack.packb(junk)):
        try:
            parsed = Manifest.from_bytes(hostile, name="versions/1")
        except DeltasyncError:
            continue
        assert parsed.data == hostile


def test_unavailable_store_is_not_an_absent_version() -> None:
    store, _ = filled(make_chain(1))
    with pytest.raises(StoreUnavailable):
        log_over(LossyStore(store, [Fault.BEFORE])).read(0)


def test_altered_manifest_has_its_own_bytes() -> None:
    manifest = make_manifest(0)
    assert manifest.hash != altered(manifest, epoch=9).hash
