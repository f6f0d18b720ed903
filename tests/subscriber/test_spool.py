"""Fetched chunks, shared: one download for all who want one, and nothing is removed that somebody needs."""

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore.errors import StoreUnavailable
from manifest.schema import ChunkRef
from subscriber.errors import StagedLost
from subscriber.spool import Share, Spool
from tests.subscriber.parts import TIMEOUT, CountingStore, small_weights, until
from tests.support.streams import StreamBuilder


class World:
    """A stream of four versions and a spool for two."""

    def __init__(self, folder: Path, spare_bytes: int) -> None:
        self.store = CountingStore(str(folder))
        self.builder = StreamBuilder(self.store, small_weights())
        self.builder.train(steps=3)
        self.store.reads.clear()
        self.folder = folder / "chunks"
        self.spool = Spool(self.store, self.folder, spare_bytes)
        self.a, self.b = self.spool.share(), self.spool.share()

    def chunks(self, version: int) -> list[ChunkRef]:
        return self.builder.manifests[version].chunks

    def hashes(self, *versions: int) -> set[bytes]:
        return {ref.hash for version in versions for ref in self.chunks(version)}

    def fetch(self, share: Share, version: int) -> int:
        """Bytes that came from the store."""
        catalog = self.builder.catalog
        return sum(self.spool.fetch(ref, catalog, version, share) for ref in self.chunks(version))

    def there(self) -> set[int]:
        """Versions of which all chunks are there; of others, none is."""
        whole = {v for v in range(4) if all(self.spool.has(ref) for ref in self.chunks(v))}
        assert len(list(self.folder.iterdir())) == len(self.hashes(*whole))
        return whole


@pytest.mark.parametrize("broken", [False, True])
def test_two_who_want_a_chunk_at_the_same_moment(broken: bool, tmp_path: Path) -> None:
    """The second one waits for the first; if that fails, it tries for itself."""
    world = World(tmp_path, 0)
    world.store.open.clear()
    world.store.broken = broken
    got: list[int | StoreUnavailable] = []
    ref = world.chunks(0)[0]

    def fetch(share: Share) -> None:
        try:
            got.append(world.spool.fetch(ref, world.builder.catalog, 0, share))
        except StoreUnavailable as error:
            got.append(error)

    threads = [threading.Thread(target=fetch, args=(share,)) for share in (world.a, world.b)]
    for thread in threads:
        thread.start()
    until(
        lambda: (
            all(ref.hash in share.wanted for share in (world.a, world.b)) and world.store.reads.total() > 0
        )
    )
    world.store.open.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert world.store.reads[ref.key] == (2 if broken else 1)
    assert ref.nbytes in got
    assert broken or 0 in got
    assert world.spool.has(ref)


def test_a_chunk_that_was_damaged_here_is_not_used_and_fetched_again(tmp_path: Path) -> None:
    """Most flipped bytes leave a chunk that decodes, to other values."""
    world = World(tmp_path, 0)
    ref, catalog = world.chunks(0)[0], world.builder.catalog
    world.fetch(world.a, 0)
    path = world.folder / f"{ref.hash.hex()}.chunk"
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for other in [b"", data[:-1], data + b"x", *flipped]:
        path.write_bytes(other)
        with pytest.raises(StagedLost, match="cannot be used"):
            world.spool.open(ref, catalog)
        assert not world.spool.has(ref)
    assert world.spool.fetch(ref, catalog, 0, world.a) == ref.nbytes
    assert len(world.spool.open(ref, catalog).sections) == len(ref.sections)


def test_a_chunk_goes_when_the_last_one_needs_it_no_more(tmp_path: Path) -> None:
    world = World(tmp_path, 0)
    assert world.fetch(world.a, 1) > 0
    assert world.fetch(world.b, 1) == 0
    world.spool.keep(world.a, set(), 1)
    assert world.there() == {1}
    world.spool.keep(world.b, set(), 1)
    assert world.there() == set()


@pytest.mark.parametrize("spare", [False, True])
def test_what_one_has_used_stays_for_one_that_is_behind(spare: bool, tmp_path: Path) -> None:
    world = World(tmp_path, 1 << 20 if spare else 0)
    world.spool.keep(world.b, set(), 1)
    for version in (1, 2, 3):
        world.fetch(world.a, version)
    world.spool.keep(world.a, set(), 3)
    assert world.there() == ({2, 3} if spare else set())
    world.fetch(world.b, 2)
    world.spool.keep(world.b, set(), 2)
    assert world.there() == ({3} if spare else set())
    assert world.store.reads[world.chunks(2)[0].key] == (1 if spare else 2)


def test_what_an_earlier_process_left_stays_until_everybody_knows_what_he_needs(tmp_path: Path) -> None:
    world = World(tmp_path, 1 << 20)
    world.fetch(world.a, 0)
    world.fetch(world.a, 1)
    again = Spool(world.store, world.folder, 1 << 20)
    a, b = again.share(), again.share()
    again.keep(a, world.hashes(1), 1)
    assert world.there() == {0, 1}
    again.keep(b, set(), 1)
    assert world.there() == {1}


def test_what_is_being_written_is_not_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a process that died was writing, is."""
    world = World(tmp_path, 0)
    world.folder.mkdir()
    (world.folder / ".left-behind").touch()
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        world.spool.keep(world.b, set(), 9)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    world.fetch(world.a, 1)
    assert world.there() == {1}


@given(
    moves=st.lists(
        st.tuples(st.booleans(), st.sampled_from(["fetch", "keep"]), st.integers(0, 3)), max_size=12
    ),
    spare=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_any_order(
    moves: list[tuple[bool, str, int]], spare: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What somebody wants is there, what is there was read once since it came, and the rest is spare or gone."""
    world = World(tmp_path_factory.mktemp("spool"), 1 << 20 if spare else 0)
    wanted: dict[bool, set[int]] = {True: set(), False: set()}
    reached = {True: -1, False: -1}
    there: set[int] = set()
    for first, move, version in moves:
        share = world.a if first else world.b
        if move == "fetch":
            assert (world.fetch(share, version) == 0) == (version in there)
            wanted[first].add(version)
            there.add(version)
        else:
            world.spool.keep(share, world.hashes(version), version)
            wanted[first], reached[first] = {version}, version
            behind = {v for v in there if spare and v > min(reached.values())}
            there &= wanted[True] | wanted[False] | behind
        if there:
            assert world.there() == there
