"""A server of two ranks that is made to fail: nothing mixed is ever served, and it ends whole, or paused with a reason.

One throwaway server takes all the blows that it survives; each test begins with its base checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deltasync.demo.sglang_server import SglangOptions, SglangServer
from tests.sglang import oracle
from tests.sglang.conftest import SGLANG_PYTHON, reset
from tests.sglang.training import Follower, Trainer, training
from tests.sglang.watcher import Answer, Watcher, answer
from tests.subscriber.parts import until

FAULTS = Path(__file__).with_name("faults")


@dataclass
class Breakable:
    """A server whose ranks can be told to fail, at its base checkpoint."""

    server: SglangServer
    checkpoint: Path
    folder: Path

    def arm(self, rank: int, point: str, action: str) -> None:
        """See `faults/deltasync_faults.py`."""
        temporary = self.folder / "temporary"
        temporary.write_text(action)
        temporary.rename(self.folder / f"{rank}.{point}")

    def armed(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture(scope="module")
def broken_server(dense_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Breakable]:
    folder = tmp_path_factory.mktemp("faults")
    options = SglangOptions(
        python=SGLANG_PYTHON,
        model=dense_checkpoint,
        tp_size=2,
        environment={"DELTASYNC_FAULTS": str(folder)},
        path=(FAULTS,),
    )
    with SglangServer(options, tmp_path_factory.mktemp("server") / "breakable.log") as server:
        yield Breakable(server.wait_ready(), dense_checkpoint, folder)


@pytest.fixture
def breakable(broken_server: Breakable) -> Breakable:
    for path in broken_server.folder.iterdir():
        path.unlink()
    reset(broken_server.server, broken_server.checkpoint)
    return broken_server


@dataclass
class Case:
    """A trainer at version 1, a subscriber that has brought the server there, and what each version answers."""

    breakable: Breakable
    trainer: Trainer
    follower: Follower
    watcher: Watcher
    expected: dict[str, Answer]

    @property
    def server(self) -> SglangServer:
        return self.breakable.server

    def learn(self, version: int) -> None:
        """Remember what the server, known to be at `version`, answers."""
        found = answer(self.server)
        assert found is not None
        assert found.versions == (str(version),)
        self.expected[str(version)] = found

    def error(self) -> str:
        status = self.follower.subscriber.report.status()
        return "" if status.last_error is None else f"{status.last_error.kind}: {status.last_error.message}"

    def held(self) -> bool:
        return not self.follower.subscriber.report.ready


@pytest.fixture
def case(breakable: Breakable, tmp_path: Path) -> Iterator[Case]:
    """Ends by comparing the server, bit by bit, with SGLang's own load of the newest version's export."""
    with training(breakable.checkpoint, tmp_path, lr=0.05, frozen="embed") as trainer:
        follower = Follower(breakable.server.url, trainer, write_timeout=5.0, request_timeout=20.0)
        with follower:
            case = Case(breakable, trainer, follower, Watcher(breakable.server), {})
            follower.reach(trainer.publish())
            case.learn(1)
            with case.watcher:
                yield case
                follower.reach(trainer.version)
                assert breakable.armed() == []
            case.learn(trainer.version)
        assert len(set(case.expected.values())) == len(case.expected)
        for found in case.watcher.answers:
            # An answer that mixes versions says so; one that does not is exactly what that version answers.
            if len(found.versions) == 1 and found.versions[0] in case.expected:
                assert found == case.expected[found.versions[0]]
        assert {version for found in case.watcher.answers for version in found.versions} <= {
            str(version) for version in range(trainer.version + 1)
        }
        sums, logs = oracle.checksums(breakable.server), oracle.logprobs(breakable.server)
        oracle.load_from_disk(breakable.server, trainer.export(trainer.version), version="oracle")
        assert oracle.checksums(breakable.server) == sums
        assert oracle.logprobs(breakable.server) == logs


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_at_prepare_changes_nothing(case: Case, rank: int) -> None:
    before = oracle.checksums(case.server)
    case.breakable.arm(rank, "gather", "raise")
    case.trainer.publish()
    until(lambda: "gather fails" in case.error() or case.follower.subscriber.version == 2)
    if case.follower.subscriber.version == 1:
        assert oracle.checksums(case.server) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_between_two_tensors_is_written_again(case: Case, rank: int) -> None:
    case.breakable.arm(rank, "scatter", "after 1 raise")
    case.follower.reach(case.trainer.publish())
    assert case.follower.applied[-1].changed is not None


def test_nobody_can_continue_a_server_that_is_half_written(case: Case) -> None:
    """A stranger's /continue_generation in the middle of a scatter: no batch runs before it is whole."""
    case.breakable.arm(1, "scatter", "after 1 wait")
    case.trainer.publish()
    until(lambda: "1.scatter.reached" in case.breakable.armed())
    count = len(case.watcher.answers)
    oracle.post(case.server, "/continue_generation")
    (case.breakable.folder / "1.scatter.reached").unlink()
    (case.breakable.folder / "go").touch()
    until(lambda: case.follower.subscriber.version == 2)
    (case.breakable.folder / "go").unlink()
    assert all(found.versions != ("1",) for found in case.watcher.answers[count + 1 :])
