"""A stop at any moment: at once, or after the apply that has begun to write; never mixed and unrecorded."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkstore import memory
from chunkstore.memory import MemoryStore
from chunkstore.store import Buffer, Store
from subscriber.daemon import Subscriber
from subscriber.engine import Prepared, Scattered
from subscriber.errors import EngineFailed
from subscriber.staging import StagedUpdate
from subscriber.threads import in_thread, join_abandoned
from subscriber.torch_engine import TorchEngine
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights, until
from tests.support.streams import StreamBuilder


class Stuck:
    """A place where a thread waits until the test lets it go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.go_on.wait(TIMEOUT)


class StuckEngine(TorchEngine):
    """Stuck at the beginning of `where`, once an update to version 1 or later is at hand."""

    def __init__(self, module: Any, where: str, stuck: Stuck) -> None:
        super().__init__(module, boot_id="boot")
        self.where, self.stuck = where, stuck

    async def prepare(self, staged: StagedUpdate) -> Prepared:
        if self.where == "prepare" and staged.target.version:
            await in_thread(lambda _: self.stuck())
        return await super().prepare(staged)

    def _scatter(self, prepared: Prepared) -> Scattered:
        if self.where == "scatter" and prepared.staged.target.version:
            self.stuck()
        return super()._scatter(prepared)


class StuckStore(MemoryStore):
    """Stuck in the first chunk of version 1: a network that says nothing."""

    def __init__(self, name: str, stuck: Stuck) -> None:
        super().__init__(name)
        self.stuck = stuck

    def get(self, key: str, *, limit: int) -> bytes:
        if key.startswith("chunks/" + f"{1:020d}"):
            self.stuck()
        return super().get(key, limit=limit)


class StuckStatusStore(MemoryStore):
    """Stuck while it writes the first status object that tells of version 1."""

    def __init__(self, name: str, stuck: Stuck) -> None:
        super().__init__(name)
        self.stuck = stuck
        self.written = threading.Event()

    def put(self, key: str, data: Buffer) -> None:
        late = (
            key.startswith("subscribers/")
            and b'"applied_version": 1' in bytes(data)
            and not self.stuck.reached.is_set()
        )
        if late:
            self.stuck()
        super().put(key, data)
        if late:
            self.written.set()


def recorded(worker: Worker) -> int | None:
    """The version that is on the record, None while an apply is not known to have ended."""
    [journal] = worker.config.state_path.glob("journal-*.json")
    entry = json.loads(journal.read_text())["entry"]
    return None if entry["applying"] is not None else int(entry["applied"]["version"])


def elapsed(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def test_stop_does_not_wait_for_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    store: Store = StuckStore(str(tmp_path), stuck)
    monkeypatch.setitem(memory._named, str(tmp_path), store)
    builder = StreamBuilder(store, small_weights())
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        builder.train()
        assert stuck.reached.wait(TIMEOUT)
        assert elapsed(subscriber.stop) < TIMEOUT / 2
    assert worker.holds(0)
    stuck.go_on.set()
    worker.restart()
    asyncio.run(worker.subscriber.run(once=True))
    assert worker.holds(1)


def test_the_last_word_is_not_overtaken_by_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status object whose writing was interrupted by the stop must not land after the one that says stopped."""
    stuck = Stuck()
    store = StuckStatusStore(str(tmp_path), stuck)
    monkeypatch.setitem(memory._named, str(tmp_path), store)
    builder = StreamBuilder(store, small_weights())
    builder.train()
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        assert stuck.reached.wait(TIMEOUT)
        stopping = threading.Thread(target=subscriber.stop)
        stopping.start()
        until(lambda: subscriber.report.status().state == "stopped")
        stuck.go_on.set()
        stopping.join(TIMEOUT)
        assert store.written.wait(TIMEOUT)
    assert worker.status().state == "stopped"


@pytest.mark.parametrize("where", ["prepare", "scatter"])
def test_an_apply_is_abandoned_before_its_first_write_and_completed_after_it(
    where: str, tmp_path: Path
) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder)
    stuck = Stuck()
    worker.engine = StuckEngine(worker.module, where, stuck)
    worker.subscriber = Subscriber(worker.config, worker.engine)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        builder.train()
        assert stuck.reached.wait(TIMEOUT)
        stopping = threading.Thread(target=subscriber.stop)
        stopping.start()
        if where == "prepare":
            stopping.join(TIMEOUT)
            stuck.go_on.set()
        else:
            stuck.go_on.set()
            stopping.join(TIMEOUT)
        assert not stopping.is_alive()
    assert worker.holds(1 if where == "scatter" else 0)
    assert recorded(worker) == (1 if where == "scatter" else 0)
    assert worker.status().state == "stopped"
    worker.restart()
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(1, TIMEOUT)
    assert worker.holds(1)


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30])
def test_stopped_at_any_moment_the_engine_holds_a_whole_version(milliseconds: int, tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder)
    asyncio.run(worker.subscriber.run(once=True))
    builder.train(steps=2)
    worker.restart()
    worker.subscriber.start()
    threading.Event().wait(milliseconds / 1000)
    worker.subscriber.stop()
    assert any(worker.holds(version) for version in (0, 2))
    worker.restart()
    asyncio.run(worker.subscriber.run(once=True))
    assert worker.holds(2)
    assert not any(applied.from_anchor for applied in worker.applied[1:])


def test_stop_before_start_and_twice(tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder)
    worker.subscriber.stop()
    with running(worker.subscriber) as subscriber:
        subscriber.stop()
        with pytest.raises(TimeoutError, match="was stopped"):
            subscriber.wait_for(0, TIMEOUT)


def test_a_signal_handler_of_the_loop_may_stop_it(tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder)

    async def serve() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.subscriber.stop)
        await worker.subscriber.run()

    def kill() -> None:
        worker.subscriber.wait_for(0, TIMEOUT)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=kill)
    killer.start()
    asyncio.run(serve())
    killer.join()
    assert worker.status().state == "stopped"


def test_a_second_stop_does_not_tear_an_apply_apart(tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder)
    stuck = Stuck()
    worker.subscriber = Subscriber(worker.config, StuckEngine(worker.module, "scatter", stuck))

    async def serve() -> None:
        running = asyncio.create_task(worker.subscriber.run())
        while not stuck.reached.is_set():
            await asyncio.sleep(0)
            if builder.version == 0 and worker.subscriber.version == 0:
                builder.train()
        for _ in range(3):
            worker.subscriber.stop()
            await asyncio.sleep(0)  # the loop sees the stop
        assert not running.done()
        stuck.go_on.set()
        await running

    asyncio.run(serve())
    assert worker.holds(1)
    assert recorded(worker) == 1


def test_the_end_of_a_run_waits_for_work_that_was_cut_short() -> None:
    """A thread that the interpreter's exit finds inside torch brings the process down with an abort."""
    stuck, finished = Stuck(), threading.Event()

    def work(_: Callable[[], None]) -> None:
        stuck()
        finished.set()

    async def cut_short() -> None:
        task = asyncio.create_task(in_thread(work))
        while not stuck.reached.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cut_short())
    joining = threading.Thread(target=join_abandoned, args=(TIMEOUT,))
    joining.start()
    assert not finished.is_set()
    stuck.go_on.set()
    joining.join(TIMEOUT)
    assert finished.is_set()
    assert elapsed(lambda: join_abandoned(TIMEOUT)) < TIMEOUT / 2


class FailingEngine(StuckEngine):
    """What is stuck fails when it goes on."""

    def _scatter(self, prepared: Prepared) -> Scattered:
        if prepared.staged.target.version:
            self.stuck()
            raise EngineFailed("the weights cannot be written", hint="")
        return super()._scatter(prepared)


def test_a_stop_during_an_apply_that_fails_is_not_lost(tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder)
    stuck = Stuck()
    subscriber = Subscriber(worker.config, FailingEngine(worker.module, "scatter", stuck))
    subscriber.start()
    subscriber.wait_for(0, TIMEOUT)
    builder.train()
    assert stuck.reached.wait(TIMEOUT)
    stopping = threading.Thread(target=subscriber.stop, daemon=True)
    stopping.start()
    until(lambda: subscriber._stop_asked)
    stuck.go_on.set()
    stopping.join(TIMEOUT)
    assert not stopping.is_alive()
