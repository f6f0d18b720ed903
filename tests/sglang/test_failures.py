"""A server of two ranks that is made to fail: nothing mixed is ever served, and it ends whole, or paused with a reason.

One throwaway server takes all the blows that it survives; each test begins with its base checkpoint.
"""

import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltasync.demo.sglang_server import SglangOptions, SglangServer
from tests.sglang import oracle
from tests.sglang.conftest import SGLANG_PYTHON, reset, with_faults
from tests.sglang.oracle import PROMPTS
from tests.sglang.proxy import Proxy
from tests.sglang.training import Follower, Trainer, equals_export, training
from tests.sglang.watcher import Answer, Watcher, answer
from tests.subscriber.parts import until

TIMEOUTS: dict[str, Any] = {"write_timeout": 3.0, "request_timeout": 3.0}


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

    def let_go(self, reached: str) -> None:
        """End the wait that has been `reached`."""
        (self.folder / reached).unlink()
        (self.folder / "go").touch()
        until(lambda: (self.folder / "gone").exists())
        (self.folder / "gone").unlink()
        (self.folder / "go").unlink()

    def armed(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture(scope="module")
def broken_server(dense_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Breakable]:
    folder = tmp_path_factory.mktemp("faults")
    options = SglangOptions(
        python=SGLANG_PYTHON,
        model=dense_checkpoint,
        tp_size=2,
        **with_faults(folder),
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
    proxy: Proxy
    expected: dict[str, Answer]

    @property
    def server(self) -> SglangServer:
        return self.breakable.server

    def restart(self) -> None:
        """Another subscriber with the files of the one before."""
        self.follower = Follower(self.proxy.url, self.trainer, **TIMEOUTS)
        self.follower.subscriber.start()

    def learn(self, version: int) -> None:
        """Remember what the server, known to be at `version`, answers."""
        found = answer(self.server)
        assert found is not None
        assert found.versions == (str(version),)
        self.expected[str(version)] = found


@pytest.fixture
def case(breakable: Breakable, tmp_path: Path) -> Iterator[Case]:
    """Ends by comparing the server, bit by bit, with SGLang's own load of the newest version's export."""
    with training(breakable.checkpoint, tmp_path, lr=0.05, frozen="embed") as trainer:
        with Proxy(breakable.server) as proxy:
            follower = Follower(proxy.url, trainer, **TIMEOUTS)
            case = Case(breakable, trainer, follower, Watcher(breakable.server), proxy, {})
            try:
                follower.subscriber.start()
                follower.reach(trainer.publish())
                case.learn(1)
                with case.watcher:
                    yield case
                    case.follower.reach(trainer.version)
                    assert breakable.armed() == []
                case.learn(trainer.version)
            finally:
                case.follower.stop()
        assert len(set(case.expected.values())) == len(case.expected)
        for found in case.watcher.answers:
            # An answer that mixes versions says so; one that does not is exactly what that version answers.
            if len(found.versions) == 1 and found.versions[0] in case.expected:
                assert found == case.expected[found.versions[0]]
        assert {version for found in case.watcher.answers for version in found.versions} <= {
            str(version) for version in range(trainer.version + 1)
        }
        equals_export(breakable.server, trainer, PROMPTS[:1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_at_prepare_changes_nothing(
    case: Case, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = oracle.checksums(case.server)
    case.breakable.arm(rank, "gather", "raise")
    case.follower.prepare(case.trainer)
    assert "gather fails" in caplog.text  # and then it was prepared again
    assert oracle.checksums(case.server) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_between_two_tensors_is_written_again(case: Case, rank: int) -> None:
    case.breakable.arm(rank, "write", "after 1 raise")
    case.follower.reach(case.trainer.publish())
    assert case.follower.applied[-1].changed is not None


def test_nobody_can_continue_a_server_that_is_half_written(case: Case) -> None:
    """A stranger's /continue_generation in the middle of a scatter: no batch runs before it is whole."""
    case.breakable.arm(1, "write", "after 1 wait")
    case.trainer.publish()
    until(lambda: "1.write.reached" in case.breakable.armed())
    count = len(case.watcher.answers)
    oracle.post(case.server, "/continue_generation")
    case.breakable.let_go("1.write.reached")
    case.follower.reach(2)
    assert all(found.versions != ("1",) for found in case.watcher.answers[count + 1 :])


@pytest.mark.parametrize("harm", ["remove", "damage"])
@pytest.mark.parametrize("kind", ["targets", "order", "old"])
def test_staged_files_that_are_lost_are_staged_again(case: Case, harm: str, kind: str) -> None:
    """While the ranks read: what they find damaged they refuse, and nothing has been written."""
    case.breakable.arm(0, "gather", "wait")
    case.trainer.publish()
    until(lambda: "0.gather.reached" in case.breakable.armed())
    files = case.follower.config.staging_path
    until(lambda: any(path.stat().st_size for path in files.glob(f"update-2-*/ranks-*/1.{kind}")))
    (path,) = files.glob(f"update-2-*/ranks-*/1.{kind}")
    if harm == "remove":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    case.breakable.let_go("0.gather.reached")


ANSWERS = [
    ("/pause_generation", ""),
    ("/continue_generation", ""),
    ("/update_weight_version", ""),
    *(("/weights_checker", op) for op in ("gather", "poll", "load", "scatter", "release")),
]


@pytest.mark.parametrize("action", ["refuse", "lose"])
@pytest.mark.parametrize(("path", "word"), ANSWERS)
def test_answers_that_are_false_or_lost(case: Case, action: str, path: str, word: str) -> None:
    """FIELD_REPORTS: AReaL#1590: the body decides. A lost answer says nothing about what was done."""
    case.proxy.once(action, path, word)
    case.follower.reach(case.trainer.publish())
    assert case.proxy.met == [action]


@pytest.mark.parametrize("word", ["scatter", "gather", "release"])
def test_answers_that_come_too_late(case: Case, word: str) -> None:
    case.proxy.once("late", "/weights_checker", word)
    case.trainer.publish()
    until(lambda: case.proxy.met == ["late"])
    case.follower.reach(2)
    case.proxy.go.set()


def test_a_rank_that_hangs_while_it_writes(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """Longer than write_timeout: nobody knows how far it came, and nothing runs until it is known."""
    caplog.set_level("INFO", "deltasync.subscriber")
    case.breakable.arm(0, "write", "after 1 wait")
    case.trainer.publish()
    until(lambda: "0.write.reached" in case.breakable.armed())
    answers = len(case.watcher.answers)
    until(lambda: "answer_lost" in caplog.text)
    case.breakable.let_go("0.write.reached")
    case.follower.reach(2)
    assert all(found.versions != ("1",) for found in case.watcher.answers[answers + 1 :])


POINTS = (
    "subscriber.after_fetch",
    "subscriber.after_stage",
    "subscriber.after_gather",
    "subscriber.after_load",
    "subscriber.before_scatter",
    "subscriber.after_pause",
    "subscriber.mid_scatter",
    "subscriber.before_release",
    "subscriber.before_resume",
    "subscriber.before_record",
    "subscriber.after_record",
)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("lost", [False, True])
def test_a_subscriber_that_is_killed(case: Case, point: str, lost: bool) -> None:
    """In every phase; with all that it had staged, or without. The next one finishes, and never needs an anchor."""
    case.follower.stop()
    case.trainer.publish()
    assert case.follower.run_process(point) == -signal.SIGKILL
    if lost:
        shutil.rmtree(case.follower.config.staging_path)
    case.restart()
    case.follower.reach(2)
    assert not any(applied.from_anchor for applied in case.follower.applied)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("lost", [False, True])
def test_half_written_and_the_subscriber_is_gone(case: Case, rank: int, lost: bool) -> None:
    """The ranks keep what they were to write, so that not even the loss of all staged files strands the server."""
    case.follower.stop()
    case.trainer.publish()
    case.breakable.arm(rank, "write", "after 1 wait")
    process = case.follower.start_process()
    until(lambda: f"{rank}.write.reached" in case.breakable.armed())
    process.kill()
    process.join()
    if lost:
        shutil.rmtree(case.follower.config.staging_path)
    oracle.post(case.server, "/continue_generation")
    case.breakable.let_go(f"{rank}.write.reached")
    case.restart()
    case.follower.reach(2)
    assert not any(applied.from_anchor for applied in case.follower.applied)
