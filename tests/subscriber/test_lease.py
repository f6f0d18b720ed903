"""When the status object is written: in time, soon after news, not for each of many, and not in step with others."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

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
    """Notes what is said on it."""

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        self.said: list[SubscriberStatus] = []
        self.broken = False

    def put(self, key: str, data: Buffer) -> None:
        if key.startswith("subscribers/"):
            self.said.append(SubscriberStatus.model_validate_json(bytes(data)))
            if self.broken:
                raise StoreUnavailable(key, hint="")
        super().put(key, data)


def lease_on(board: Board, interval: float, **time_and_chance: Callable[[], float]) -> tuple[Lease, Report]:
    report = Report("worker", interval, None)
    return Lease(board, report, interval, **time_and_chance), report


async def while_running(lease: Lease, condition: Callable[[], bool]) -> None:
    task = asyncio.create_task(lease.run())
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.001)
    task.cancel()


def test_when_it_is_time() -> None:
    now, chance = [100.0], [0.0]
    lease, _ = lease_on(Board(), 30.0, clock=lambda: now[0], uniform=lambda: chance[0])
    assert lease.left() == pytest.approx(24)
    now[0] += 9
    asyncio.run(lease.renew())
    assert lease.left() == pytest.approx(24)
    chance[0] = 1.0
    assert lease.left() == pytest.approx(30)
    now[0] += 1
    lease.tell()
    assert lease.left() == pytest.approx(2)
    now[0] += 5
    assert lease.left() == pytest.approx(-3)
    asyncio.run(lease.renew())
    assert lease.left() == pytest.approx(30)


def test_it_is_renewed_again_and_again_though_it_cannot_be_written() -> None:
    board = Board()
    board.broken = True
    lease, report = lease_on(board, 0.01)
    asyncio.run(while_running(lease, lambda: len(board.said) >= 12))
    assert b'errors_total{kind="store_unavailable"}' in report.metrics.text()


def test_many_changes_share_one_writing() -> None:
    board = Board()
    lease, report = lease_on(board, 1.0)

    async def run() -> None:
        await lease.renew()
        for version in range(200):
            report.serving(version, bytes(32))
            lease.tell()
        await while_running(lease, lambda: len(board.said) >= 2)

    asyncio.run(run())
    assert [status.applied_version for status in board.said] == [None, 199]


def test_many_versions_at_once_are_few_writings_and_the_last_word_is_true(tmp_path: Path) -> None:
    board = memory._named[str(tmp_path)] = Board(str(tmp_path))
    builder = StreamBuilder(board, small_weights())
    worker = Worker(tmp_path, builder, status_interval=600.0)
    with running(worker.subscriber) as subscriber:
        for version in range(20):
            subscriber.wait_for(version, TIMEOUT)
            builder.train()
        subscriber.wait_for(20, TIMEOUT)
    assert len(worker.applied) >= 20
    assert len(board.said) <= 3  # begun, perhaps applied, stopped
    assert board.said[-1].applied_version == 20
    assert board.said[-1].state == "stopped"


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
