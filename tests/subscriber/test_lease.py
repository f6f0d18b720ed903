"""When the status object is written: in time, soon after news, not for each of many, and not in step with others."""

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from chunkstore import memory
from chunkstore.errors import StoreUnavailable
from chunkstore.memory import MemoryStore
from chunkstore.store import Buffer
from subscriber.lease import Lease
from subscriber.report import Report
from subscriber.status import SubscriberStatus
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights, until
from tests.support.streams import StreamBuilder


class Board(MemoryStore):
    """Notes what is said on it, and when."""

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        self.said: list[tuple[float, SubscriberStatus]] = []
        self.broken = False

    def put(self, key: str, data: Buffer) -> None:
        if key.startswith("subscribers/"):
            self.said.append((time.monotonic(), SubscriberStatus.model_validate_json(bytes(data))))
            if self.broken:
                raise StoreUnavailable(key, hint="")
        super().put(key, data)


def lease_on(board: Board, interval: float) -> tuple[Lease, Report]:
    report = Report("worker", interval, None)
    return Lease(board, report, interval), report


async def while_running(lease: Lease, condition: Callable[[], bool]) -> None:
    task = asyncio.create_task(lease.run())
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.001)
    task.cancel()


def test_it_is_renewed_in_time_whether_or_not_it_can_be_written() -> None:
    board = Board()
    board.broken = True
    lease, report = lease_on(board, 0.05)
    asyncio.run(while_running(lease, lambda: len(board.said) >= 12))
    times = [at for at, _ in board.said]
    gaps = [b - a for a, b in pairwise(times)]
    assert min(gaps) >= 0.8 * 0.05
    assert len({round(gap, 4) for gap in gaps}) > 1, "or a fleet writes in step"
    assert b'errors_total{kind="store_unavailable"}' in report.metrics.text()


def test_news_is_told_soon_but_many_changes_share_one_writing() -> None:
    board = Board()
    lease, report = lease_on(board, 1.0)

    async def run() -> None:
        await lease.renew()
        for version in range(200):
            report.serving(version, bytes(32))
            lease.tell()
        await while_running(lease, lambda: len(board.said) >= 2)

    asyncio.run(run())
    (first, _), (second, status) = board.said
    assert status.applied_version == 199
    assert second - first >= 0.1


def test_many_versions_at_once_are_few_writings_and_the_last_word_is_true(tmp_path: Path) -> None:
    board = memory._named[str(tmp_path)] = Board(str(tmp_path))
    builder = StreamBuilder(board, small_weights())
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        for version in range(20):
            subscriber.wait_for(version, TIMEOUT)
            builder.train()
        subscriber.wait_for(20, TIMEOUT)
    assert len(worker.applied) >= 20
    assert len(board.said) < 10
    assert board.said[-1][1].applied_version == 20
    assert board.said[-1][1].state == "stopped"


def test_a_refusal_is_told_at_once(tmp_path: Path) -> None:
    board = memory._named[str(tmp_path)] = Board(str(tmp_path))
    builder = StreamBuilder(board, small_weights())
    worker = Worker(tmp_path, builder, status_interval=60.0)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        lost = builder.make(small_weights(seed=4), 0)
        for chunk in lost.chunks:
            board.delete(chunk.key)
        builder.commit(lost, small_weights(seed=4))
        until(lambda: worker.refused() == [1])
