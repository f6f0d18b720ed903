"""Cold starts at any time: beside a publisher, garbage collection and compaction that never rest, or die midway."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from chunkstore.errors import ObjectMissing
from chunkstore.memory import MemoryStore
from chunkstore.posix import PosixStore
from manifest.collect import delete_garbage, read_holdings
from manifest.gc import Policy, Reason, collectable
from manifest.verify import verify_stream
from publisher.compact import compact
from publisher.errors import CompactionLate
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights, until
from tests.support.streams import StreamBuilder

GRACE = 1.0


@contextmanager
def restless(*work: Callable[[], None]) -> Iterator[None]:
    """Each of `work` again and again on a thread of its own, while the block runs. Raises what one of them raised."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def run(once: Callable[[], None]) -> None:
        try:
            while not stop.wait(0.01):  # or those that spin keep the others from the interpreter
                once()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(once,)) for once in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT)
    if failures:
        raise failures[0]


class Keepers:
    """What runs beside the subscribers of `builder`'s stream, which never gets far ahead of its newest anchor.

    On a busy machine compaction gives up when it took too long; the trainer then waits for it, so that
    garbage collection always comes to have something to delete.
    """

    def __init__(self, builder: StreamBuilder) -> None:
        self.builder = builder
        self.anchored = 0
        self.superseded = 0

    def train(self) -> None:
        if self.builder.version < self.anchored + 20:
            self.builder.train(0.05)

    def wait_for_deletions(self) -> None:
        """Return once garbage collection has followed the stream further."""
        deleted = self.superseded
        until(lambda: self.superseded > deleted)

    def collect(self) -> None:
        policy = Policy(GRACE)
        garbage = collectable(read_holdings(self.builder.log, policy), policy)
        delete_garbage(self.builder.store, garbage.objects)
        self.superseded += sum(one.reason is Reason.SUPERSEDED for one in garbage.objects)

    def compact(self) -> None:
        # A version whose objects went meanwhile, or that took too long on a busy machine, is the next one's turn.
        with suppress(CompactionLate, ObjectMissing):
            version = self.builder.version
            if version > self.anchored:
                compact(self.builder.log, version, GRACE)
                self.anchored = version


def test_cold_starts_beside_everything_else(tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights(), per_chunk=1)
    keepers = Keepers(builder)
    with restless(keepers.train, keepers.collect, keepers.compact):
        until(lambda: keepers.superseded > 0)
        for number in range(6):
            wanted = builder.version
            worker = Worker(tmp_path, builder, id=f"worker-{number}", status_interval=0.05)
            asyncio.run(asyncio.wait_for(worker.subscriber.run(until_version=wanted), TIMEOUT))
            reached = worker.applied[-1].version
            assert reached >= wanted
            assert worker.applied[0].from_anchor
            assert worker.holds(reached)
            if number < 2:
                keepers.wait_for_deletions()
    keepers.collect()
    report = verify_stream(builder.store)
    assert report.problems == ()
    assert report.unverified == ()
    assert report.collected


def test_one_that_follows_is_never_left_behind(tmp_path: Path) -> None:
    """It is stopped and started again, with other weights, while everything else goes on."""
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights(), per_chunk=1)
    keepers = Keepers(builder)
    worker = Worker(tmp_path, builder, status_interval=0.05)
    with restless(keepers.train, keepers.collect, keepers.compact):
        until(lambda: keepers.superseded > 0)
        for _ in range(3):
            with running(worker.subscriber) as subscriber:
                subscriber.wait_for(builder.version, TIMEOUT)
                keepers.wait_for_deletions()
                subscriber.wait_for(builder.version, TIMEOUT)
            assert worker.holds(worker.applied[-1].version)
            worker.restart()


@pytest.mark.parametrize(
    ("command", "point"),
    [
        ("gc", "gc.before_delete:2"),
        ("gc", "gc.before_delete:4"),
        ("compact", "publisher.before_chunk"),
        ("compact", "publisher.after_chunks"),
        ("compact", "compact.before_anchor"),
        ("compact", "compact.after_anchor"),
    ],
)
def test_a_cold_start_after_either_was_killed(command: str, point: str, tmp_path: Path) -> None:
    builder = StreamBuilder(PosixStore(tmp_path / "store"), small_weights(), per_chunk=1)
    builder.train(0.3, steps=3)
    builder.alternate(2)
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            os.utime(path, (1e9, 1e9))
    arguments = [sys.executable, "-m", "deltasync.cli", "store", command, str(tmp_path / "store")]
    killed = subprocess.run(arguments, env=os.environ | {"DELTASYNC_CRASH_AT": point}, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    worker = Worker(tmp_path, builder)
    asyncio.run(worker.subscriber.run(once=True))
    assert worker.holds(3)
    assert subprocess.run(arguments, stdout=subprocess.DEVNULL, timeout=60).returncode == 0
    late = Worker(tmp_path, builder, id="late")
    asyncio.run(late.subscriber.run(once=True))
    assert late.holds(3)
