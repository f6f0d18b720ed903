"""Real ranks over gloo, kill −9 of any at any point, a restart with another number: nothing is lost or mixed."""

import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
import torch

import deltasync
from chunkstore.posix import PosixStore
from manifest.log import VersionLog, open_stream
from tests.publisher.gloo_rank import main
from tests.publisher.ranks import Model
from tests.publisher.zoo import published
from tests.support.crashes import assert_nothing_leaks
from tests.support.processes import PROCESSES

STEPS = 3


class World:
    """A store, a trainer's checkpoint, and starts of the trainer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = PosixStore(root / "stream")
        self.state = root / "trainer.pt"
        self.starts = 0

    def run(self, world_size: int, steps: int, crash: dict[int, str] | None = None) -> list[int | None]:
        """Start all ranks and wait; when one dies the others are killed, as launchers do. Exit codes by rank."""
        self.starts += 1
        meeting = self.root / f"meeting-{self.starts}"
        paths = (str(self.root / "stream"), str(self.state), steps, str(meeting))
        points = [(crash or {}).get(rank, "") for rank in range(world_size)]
        ranks = [
            PROCESSES.Process(target=main, args=(rank, world_size, *paths, point))
            for rank, point in enumerate(points)
        ]
        try:
            for rank in ranks:
                rank.start()
            for died in self._ends(ranks):
                if died.exitcode:
                    break
            return [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()

    def _ends(self, ranks: Sequence[ForkServerProcess]) -> Iterator[ForkServerProcess]:
        left = list(ranks)
        while left:
            ended = wait([rank.sentinel for rank in left], timeout=120)
            assert ended, "the ranks do not come to an end"
            for rank in [rank for rank in left if rank.sentinel in ended]:
                left.remove(rank)
                rank.join()
                yield rank

    def newest(self) -> int:
        newest = VersionLog(self.store, open_stream(self.store)).newest()
        assert newest is not None
        return newest.version

    def check(self) -> None:
        """The newest version is the trainer's weights, and the whole stream is sound."""
        checkpoint = torch.load(self.state, weights_only=True)
        assert checkpoint["step"] == STEPS
        found = published(self.store, self.newest())
        for name, tensor in checkpoint["model"].items():
            wire = tensor.bfloat16().view(torch.uint16) if tensor.is_floating_point() else tensor
            assert np.array_equal(found[name], wire.reshape(-1).numpy().view(found[name].dtype)), name
        assert_nothing_leaks(self.root / "stream")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize(
    ("rank", "point", "then"),
    [
        (0, "coordinator.before_call:3", 2),
        (0, "coordinator.after_call:3", 3),
        (0, "coordinator.before_call:5", 2),  # that nothing has changed
        (0, "coordinator.after_call:5", 1),
        (0, "publisher.before_chunk:2", 1),
        (0, "coordinator.after_parts:3", 2),
        (0, "publisher.before_manifest:3", 3),
        (0, "publisher.after_manifest:3", 2),
        (0, "publisher.before_manifest:1", 2),
        (1, "publisher.before_chunk:2", 3),
        (1, "publisher.after_chunk:2", 2),
        (1, "writer.before_part:3", 2),
        (1, "writer.after_part:3", 1),
        (1, "writer.after_part:1", 2),
    ],
)
def test_a_rank_killed_anywhere(world: World, rank: int, point: str, then: int) -> None:
    assert world.run(2, STEPS, {rank: point})[rank] == -signal.SIGKILL
    assert world.run(then, STEPS) == [0] * then
    world.check()


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (0, "publisher.after_claim"),
        (0, "coordinator.before_call"),
        (0, "coordinator.after_call"),
        (1, "writer.before_part"),
        (1, "writer.after_part"),
        (0, "coordinator.before_call:2"),
        (0, "coordinator.after_call:2"),
    ],
)
def test_killed_while_the_writers_join(world: World, rank: int, point: str) -> None:
    assert world.run(2, 1) == [0, 0]
    assert world.run(2, STEPS, {rank: point})[rank] == -signal.SIGKILL
    assert world.run(3, STEPS) == [0, 0, 0]
    world.check()


def test_eight_ranks_and_a_subscriber(world: World) -> None:
    """A subscriber follows from version to version, over the death of a rank and a restart with fewer."""
    config = deltasync.SubscriberConfig.model_validate(
        {"store": {"url": str(world.root / "stream")}, "id": "s", "state_dir": str(world.root / "s"),
         "http": None, "poll_interval": 0.1}
    )  # fmt: skip
    assert world.run(8, 1) == [0] * 8
    model = Model(seed=9).to(torch.bfloat16)
    engine = deltasync.TorchEngine(model)
    subscriber = deltasync.Subscriber(config, engine)
    subscriber.start()
    try:
        subscriber.wait_for(1, timeout=60)
        assert world.run(8, STEPS, {5: "writer.before_part:2"})[5] == -signal.SIGKILL
        assert world.run(3, STEPS) == [0, 0, 0]
        subscriber.wait_for(world.newest(), timeout=60)
    finally:
        subscriber.stop()
    world.check()
    trained = torch.load(world.state, weights_only=True)["model"]
    for name, tensor in model.state_dict().items():
        wanted = trained[name].to(tensor.dtype)
        assert tensor.flatten().view(torch.uint8).equal(wanted.flatten().view(torch.uint8)), name
