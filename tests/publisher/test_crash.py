"""kill −9 of the publisher's process at each of its crash points, then a restart: the last version is the trainer's."""

from pathlib import Path

import numpy as np
import pytest
import torch

from chunkstore.posix import PosixStore
from manifest.checkpoint import Checkpoint
from manifest.log import VersionLog, open_stream, read_catalog
from tests.publisher import crashing_trainer
from tests.publisher.zoo import published, wire_bits
from tests.support.crashes import assert_nothing_leaks, dies_at, succeeds

STEPS = 4

FIRST_START = [
    "probe.before_delete",
    "chunkstore.posix.before_link",
    "chunkstore.posix.after_link",
    "chunkstore.posix.before_unlink",
    "chunkstore.posix.after_unlink",
    "stream.before_create",
    "stream.after_create",
    "catalog.before_put",
    "catalog.after_put",
]
TRAINING = [
    "publisher.before_chunk:1",
    "publisher.before_chunk:3",
    "chunkstore.posix.before_rename:3",
    "chunkstore.posix.after_rename:3",
    "publisher.after_chunk:3",
    "publisher.after_chunks:3",
    "publisher.before_manifest:1",
    "publisher.before_manifest:3",
    "chunkstore.posix.before_link:6",
    "chunkstore.posix.after_link:6",
    "publisher.after_manifest:3",
    "publisher.after_alternate",
]
RESTART = ["publisher.before_claim", "publisher.after_claim"]


class World:
    """A store, a trainer's checkpoint, and starts of the trainer. `base`: version 0 refers to a checkpoint."""

    def __init__(self, folder: Path, *, base: bool = False) -> None:
        self.root, self.state = folder / "stream", folder / "trainer.pt"
        self._base = folder / "base" if base else None
        self._version = folder / "version"

    @property
    def _base_name(self) -> str | None:
        return None if self._base is None else str(self._base)

    def killed(self, point: str, steps: int = STEPS) -> None:
        dies_at(point, crashing_trainer.main, str(self.root), str(self.state), steps, self._base_name)

    def run(self, steps: int = STEPS) -> None:
        version = str(self._version)
        succeeds(crashing_trainer.main, str(self.root), str(self.state), steps, self._base_name, version)

    def check(self) -> None:
        """The newest version is the trainer's weights, the stream is sound, and nothing but it is left."""
        store = PosixStore(self.root)
        newest = VersionLog(store, open_stream(store)).newest()
        assert newest is not None
        assert newest.version == int(self._version.read_text())
        found, weights = published(store, newest.version), torch.load(self.state, weights_only=True)["model"]
        wanted = wire_bits(read_catalog(store, newest.catalog), weights)
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
        assert_nothing_leaks(self.root, None if self._base is None else Checkpoint.open(self._base))


@pytest.mark.parametrize("point", FIRST_START + TRAINING)
def test_killed_and_restarted_ends_bit_identical(tmp_path: Path, point: str) -> None:
    """FIELD_REPORTS: prime-rl#3386, slime#2104: dying between chunk upload and manifest loses no change."""
    world = World(tmp_path)
    world.killed(point)
    world.run()
    world.check()


@pytest.mark.parametrize("point", RESTART)
def test_killed_while_it_takes_the_stream_over(tmp_path: Path, point: str) -> None:
    world = World(tmp_path)
    world.run(steps=1)
    world.killed(point)
    world.run()
    world.check()


@pytest.mark.parametrize("point", ["publisher.before_reference", "publisher.after_reference"])
def test_killed_at_a_version_that_refers_to_a_checkpoint(tmp_path: Path, point: str) -> None:
    world = World(tmp_path, base=True)
    world.killed(point)
    world.run(steps=2)
    world.check()
