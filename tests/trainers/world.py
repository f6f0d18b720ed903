"""A real subscriber that follows a trainer of several processes, and compares what it holds with their weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import torch

import deltasync
from chunkstore.posix import PosixStore
from manifest.log import VersionLog, open_stream
from manifest.schema import Manifest
from tests.support.processes import PROCESSES
from tests.trainers.policies import policy


class World:
    """A stream, a trainer's checkpoint, starts of the trainer, and a rollout worker that begins blank and follows.

    `main`: what a rank runs, see `tests.trainers.rank.main`. `dtype`: of the rollouts' weights.
    """

    def __init__(
        self, root: Path, main: Callable[..., None], policy_name: str, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.root, self.main = root, main
        self.store = PosixStore(root / "stream")
        self.rollout = policy(policy_name, seed=9).to(dtype)
        self.starts = 0
        self.checked: list[int] = []

    def run(self, name: str, world_size: int, crash: dict[int, str] | None = None) -> list[int | None]:
        """Train in layout `name` to the end, or until a rank dies at the point that `crash` says; every version is
        compared meanwhile. Exit codes by rank.
        """
        self.starts += 1
        for left in self.root.glob("state-*.pt"):  # by ranks that were killed
            left.unlink()
        meeting = str(self.root / f"meeting-{self.starts}")
        ranks = [
            PROCESSES.Process(
                target=self.main,
                args=(name, rank, world_size, str(self.root), meeting, (crash or {}).get(rank, "")),
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
