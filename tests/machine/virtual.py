"""What cannot be real in the machine: threads, clocks, sleeps, random ids, the event loop. All else is the real code.

Inside `virtual()` the packages see these stand-ins in the places of the real ones, by identity, wherever they were
imported; each asks the simulation that is `Sim.active`.
"""

import asyncio
import concurrent.futures
import importlib.metadata
import random
import secrets
import selectors
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final, TypeVar
from unittest import mock

import chunkstore.crashpoints
import chunkstore.open
import manifest.history
import subscriber.threads
from chunkstore.store import Store
from tests.machine.sim import Death, Fault, Sim

T = TypeVar("T")

PACKAGES: Final = ("chunkstore", "manifest", "publisher", "subscriber")


def sim() -> Sim:
    assert Sim.active is not None, "outside of a simulation"
    return Sim.active


class Future(concurrent.futures.Future[Any]):
    """Whoever waits for it stops in the simulation."""

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if not self.done():
            sim().wait(self.done, "future", timeout)


class Executor:
    """A ThreadPoolExecutor whose threads are those of the simulation."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._max, self._name = max_workers, thread_name_prefix
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._running = 0

    def submit(self, work: Callable[..., Any], *args: Any) -> Future:
        future = Future()
        self._queue.append((future, lambda: work(*args)))
        if self._running < self._max:
            here = sim().current
            assert here is not None
            sim().spawn(here.process, self._name, self._work)
            self._running += 1
        return future

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for future in [self.submit(work, item) for item in items]:
            yield future.result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            while self._queue:
                self._queue.popleft()[0].cancel()
        if wait and self._running:
            sim().wait(lambda: not self._running, "shutdown")

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _work(self) -> None:
        try:
            while self._queue:
                future, work = self._queue.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    result = work()
                except Death:
                    raise
                except BaseException as error:  # noqa: BLE001 - as ThreadPoolExecutor does
                    future.set_exception(error)
                else:
                    future.set_result(result)
        finally:
            self._running -= 1


class Event:
    """A threading.Event."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            sim().wait(self.is_set, "event", timeout)
        return self._set


class _Selector(selectors.SelectSelector):
    """Nothing is ever ready: the loop sleeps in the simulation instead."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            sim().wait(lambda: False, "loop", timeout)
        return []


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time is the simulation's."""

    def __init__(self) -> None:
        super().__init__(_Selector())
        self._clock_resolution = 1e-3  # Unix seconds as floats are no finer than microseconds
        self.set_exception_handler(lambda *_: None)  # of tasks whose process was killed

    def time(self) -> float:
        return sim().now

    def run(self, main: Any) -> None:
        """Until `main` ends, or its process is killed."""
        try:
            self.run_until_complete(main)
        except Death:
            self.run_until_complete(_end_of_all())
        finally:
            self.close()


async def _end_of_all() -> None:
    """Unwind what is left of a process that was killed."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


async def in_thread(work: Callable[[Callable[[], None]], T]) -> T:
    """Where the real one starts a thread, the loop itself does the work: a process stops as a whole."""
    await asyncio.sleep(0)
    return work(lambda: None)


def started(call: Callable[[], T]) -> Future:
    """`call` on a thread of its own."""
    executor = Executor(1, "history")
    if sim().current is not None:
        return executor.submit(call)
    future = Future()
    future.set_result(call())
    return future


def crash_point(name: str) -> None:
    """A stop, at which the process may die."""
    if sim().current is not None and sim().operation(name) is Fault.DEATH:
        sim().die()


class _Time:
    """The time module."""

    perf_counter = staticmethod(time.perf_counter)

    @staticmethod
    def time() -> float:
        return sim().now

    monotonic = time

    @staticmethod
    def sleep(seconds: float) -> None:
        sim().wait(lambda: False, "sleep", seconds)


class _Secrets:
    """The secrets module."""

    @staticmethod
    def token_bytes(length: int) -> bytes:
        return sim().token(length)

    @staticmethod
    def token_hex(length: int) -> str:
        return sim().token(length).hex()

    @staticmethod
    def randbits(bits: int) -> int:
        return int.from_bytes(sim().token(16), "big") >> (128 - bits)


def _uuid4() -> uuid.UUID:
    return uuid.UUID(bytes=sim().token(16))


@contextmanager
def virtual(open_store: Callable[..., Store]) -> Iterator[None]:
    """`open_store`: instead of chunkstore.open's, where a subscriber opens its store."""
    stand_ins: dict[int, Any] = {
        id(real): stand_in
        for real, stand_in in (
            (time, _Time),
            (time.time, _Time.time),
            (time.monotonic, _Time.time),
            (time.sleep, _Time.sleep),
            (random.random, lambda: 0.5),
            (secrets, _Secrets),
            (uuid.uuid4, _uuid4),
            (threading, SimpleNamespace(Event=Event, Lock=threading.Lock, Condition=threading.Condition)),
            (concurrent.futures.ThreadPoolExecutor, Executor),
            (subscriber.threads.in_thread, in_thread),
            (chunkstore.crashpoints.crash_point, crash_point),
            (chunkstore.open.open_store, open_store),
            (manifest.history._started, started),
            (importlib.metadata.version, lambda name: "0"),  # which is slow
        )
    }
    modules = [m for n, m in sys.modules.items() if n.partition(".")[0] in PACKAGES]
    undo: list[Callable[[], object]] = []
    with mock.patch.object(chunkstore.crashpoints, "crash_point", crash_point):
        for module in modules:
            undo += _replace(module, stand_ins)
        try:
            yield
        finally:
            for one in reversed(undo):
                one()


def _replace(module: ModuleType, stand_ins: Mapping[int, Any]) -> list[Callable[[], object]]:
    undo: list[Callable[[], object]] = []
    for name, value in list(vars(module).items()):
        stand_in = stand_ins.get(id(value))
        if stand_in is not None and (value is not threading or module.__name__ == "publisher.member"):
            setattr(module, name, stand_in)
            undo.append(lambda name=name, value=value: setattr(module, name, value))  # type: ignore[misc]
        for function in _functions(value, module.__name__):
            defaults = function.__defaults__
            if defaults and any(id(one) in stand_ins for one in defaults):
                function.__defaults__ = tuple(stand_ins.get(id(one), one) for one in defaults)
                undo.append(lambda f=function, d=defaults: setattr(f, "__defaults__", d))  # type: ignore[misc]
            named = function.__kwdefaults__
            if named and any(id(one) in stand_ins for one in named.values()):
                function.__kwdefaults__ = {k: stand_ins.get(id(one), one) for k, one in named.items()}
                undo.append(lambda f=function, d=named: setattr(f, "__kwdefaults__", d))  # type: ignore[misc]
    return undo


def _functions(value: object, module: str) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType) and value.__module__ == module:
        yield value
    elif isinstance(value, type) and value.__module__ == module:
        yield from (f for f in vars(value).values() if isinstance(f, FunctionType))
