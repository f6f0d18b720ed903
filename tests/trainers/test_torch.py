"""Real trainers over gloo and a real subscriber, which holds the trainer's gathered weights at every version."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

import deltasync
from chunkstore.posix import PosixStore
from manifest.log import VersionLog, open_stream
from manifest.schema import Manifest
from manifest.verify import verify_stream
from tests.support.processes import PROCESSES
from tests.trainers.layouts import LAYOUTS
from tests.trainers.policies import policy
from tests.trainers.rank import main


class World:
    """A stream, a trainer's checkpoint, starts of the trainer, and a rollout worker that begins blank and follows."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name, self.layout = root, name, LAYOUTS[name]
        self.store = PosixStore(root / "stream")
        self.rollout = policy(self.layout.policy, seed=9).to(torch.bfloat16)
        self.starts = 0
        self.checked: list[int] = []

    def run(
        self, world_size: int, crash: dict[int, str] | None = None, name: str | None = None
    ) -> list[int | None]:
        """Train to the end, or until a rank dies; every version is compared meanwhile. Exit codes by rank.

        `name`: the layout, if it is another one now.
        """
        self.starts += 1
        for left in self.root.glob("state-*.pt"):  # by ranks that were killed
            left.unlink()
        meeting = str(self.root / f"meeting-{self.starts}")
        ranks = [
            PROCESSES.Process(
                target=main,
                args=(
                    name or self.name,
                    rank,
                    world_size,
                    str(self.root),
                    meeting,
                    (crash or {}).get(rank, ""),
                ),
            )
            for rank in range(world_size)
        ]
        try:
            for rank in ranks:
                rank.start()
            with self.following() as subscriber:
                while any(rank.exitcode is None for rank in ranks) and not any(
                    rank.exitcode for rank in ranks
                ):
                    if not self._check_next(subscriber):
                        wait([rank.sentinel for rank in ranks if rank.exitcode is None], timeout=0.01)
            return [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()

    @contextmanager
    def following(self) -> Iterator[deltasync.Subscriber]:
        config = {
            "store": {"url": str(self.root / "stream")},
            "id": "rollout",
            "state_dir": str(self.root / "state"),
            "http": None,
            "poll_interval": 0.02,
        }
        engine = deltasync.TorchEngine(self.rollout)
        subscriber = deltasync.Subscriber(deltasync.SubscriberConfig.model_validate(config), engine)
        subscriber.start()
        try:
            yield subscriber
        finally:
            subscriber.stop()

    def _check_next(self, subscriber: deltasync.Subscriber) -> bool:
        """Compare a version that the trainer waits with; False if it waits with none."""
        saved = sorted(self.root.glob("state-*.pt"))
        if not saved:
            return False
        version = int(saved[0].stem.split("-")[1])
        subscriber.wait_for(version, timeout=60)
        state, live = torch.load(saved[0], weights_only=True), self.rollout.state_dict()
        assert live.keys() == state.keys()
        for name, tensor in live.items():
            wanted = state[name].to(tensor.dtype)
            assert tensor.reshape(-1).view(torch.uint8).equal(wanted.reshape(-1).view(torch.uint8)), name
        self.checked.append(version)
        saved[0].unlink()
        return True

    def manifest(self, version: int) -> Manifest:
        return VersionLog(self.store, open_stream(self.store)).read_required(version)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_rollouts_hold_what_the_trainer_gathers(name: str, tmp_path: Path) -> None:
    world = World(tmp_path, name)
    size = world.layout.world_size
    assert world.run(size) == [0] * size
    newest = world.checked[-1]
    assert newest >= 5
    assert sorted({*world.checked}) == list(range(newest + 1))
    writers = size if world.layout.everyone else 1
    for version in range(1, newest + 1):
        stats = world.manifest(version).stats
        assert stats.unproved_blocks == 0
        assert sum(stats.sources.values()) == stats.elements
        assert ("inversion" in stats.sources) != ("snapshot" in stats.sources)
        senders = {chunk.key.rpartition("/")[2].partition("-")[0] for chunk in world.manifest(version).chunks}
        assert senders == {str(rank) for rank in range(writers)}
    assert not verify_stream(world.store).problems


@pytest.mark.parametrize(
    ("name", "point", "then", "size"),
    [
        ("FSDP2, uneven and empty shards", "writer.before_part:4", "FSDP2, uneven and empty shards", 3),
        ("FSDP2, columns", "writer.after_part:4", "ZeroRedundancyOptimizer", 2),
    ],
)
def test_a_rank_that_is_killed_and_a_restart_with_other_ranks(
    name: str, point: str, then: str, size: int, tmp_path: Path
) -> None:
    """The new trainer continues the chain: what it holds is compared with it by digests, whatever the layout."""
    world = World(tmp_path, name)
    assert world.run(world.layout.world_size, {1: point})[1] == -signal.SIGKILL
    before = world.checked[-1]
    assert before >= 1
    assert world.run(size, name=then) == [0] * size
    newest = world.checked[-1]
    assert newest > before + 1
    assert [world.manifest(version).kind for version in range(newest + 1)] == ["anchor"] + ["delta"] * newest
    assert not verify_stream(world.store).problems
