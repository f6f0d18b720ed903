"""Many processes in one, step by step: only one of their threads runs at a time, to its next stop, as the test says.

A thread stops at every store operation and crash point, where it waits for another thread, and where it sleeps. Time
stands still until the test lets it pass. So a run is a list of decisions, and the same list is the same run.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NoReturn


class Fault(Enum):
    """What happens to one store operation."""

    NONE = "it goes through"
    BEFORE = "503, and nothing was done"
    AFTER = "it was done, and the reply is lost"
    LATE = "the reply is lost, and a write will be done later, or never"
    TAKEN = "412 although this very call, retried by a client below, created the object"
    DENIED = "403, and nothing was done"
    DEATH = "it was done, and kill -9 comes before the reply"


class Death(BaseException):
    """The process was killed: unwinds its threads, which reach nothing any more."""


@dataclass(eq=False)
class Process:
    """`outage`: until when its operations have which fault, those whose key contains what. `frozen`: until when it
    does nothing, as after SIGSTOP.
    """

    name: str
    alive: bool = True
    outage: tuple[float, Fault, str] = (0.0, Fault.NONE, "")
    frozen: float = 0.0
    tasks: list["Task"] = field(default_factory=list)


@dataclass(eq=False)
class Task:
    """One thread of a process. `until`: what it waits for, None at an operation. `wake`: when it wakes by itself."""

    process: Process
    name: str
    work: Callable[[], object]
    budget: int = 0
    fault: Fault = Fault.NONE
    until: Callable[[], bool] | None = None
    wake: float | None = None
    done: bool = False
    at: str = "start"
    thread: "_Thread | None" = None


class _Thread:
    """A thread of the operating system, used for one task after the other."""

    idle: ClassVar[list["_Thread"]] = []

    def __init__(self) -> None:
        self.go, self.back = (
            threading.Lock(),
            threading.Lock(),
        )  # plain locks: one releases what another has taken
        self.go.acquire()
        self.back.acquire()
        self.job: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, daemon=True, name="machine").start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            self.job()
            self.idle.append(self)
            self.back.release()


class Sim:
    """`now`: Unix seconds by everybody's clock. `error`: the first thing that should not have happened."""

    active: "Sim | None" = None

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self.error: BaseException | None = None
        self.processes: list[Process] = []
        self.steps = 0
        self.sleepy_stops = 0
        self._current: Task | None = None
        self._ids = 0

    # What the test does.

    def process(self, name: str) -> Process:
        made = Process(name)
        self.processes.append(made)
        return made

    def spawn(self, process: Process, name: str, work: Callable[[], object]) -> Task:
        """A new thread of `process`, stopped before its first step."""
        if not process.alive:
            raise Death
        task = Task(process, name, work)
        process.tasks.append(task)
        return task

    def runnable(self) -> list[Task]:
        """Threads that can go on now, in the order they were made."""
        return [
            task
            for process in self.processes
            for task in process.tasks
            if self.now >= process.frozen and not task.done and (task.until is None or task.until())
        ]

    def run(self, task: Task, operations: int, fault: Fault = Fault.NONE) -> None:
        """Let `task` do so many operations, the last one with `fault`, and go on to its next stop."""
        task.budget, task.fault = operations, fault
        self._resume(task)
        self._bury()
        if self.error is not None:
            raise self.error

    def kill(self, process: Process) -> None:
        """End all threads of `process`, where they are."""
        process.alive = False
        self._bury()

    def next_wake(self) -> float | None:
        """When the next sleeper wakes; None if nobody sleeps."""
        wakes = [
            max(task.wake or 0.0, process.frozen)
            for process in self.processes
            for task in process.tasks
            if not task.done
        ]
        return min((wake for wake in wakes if wake > self.now), default=None)

    def _bury(self) -> None:
        for process in self.processes:
            while not process.alive and process.tasks:
                task = process.tasks[-1]
                if not task.done and task.thread is not None:
                    self._resume(task)
                if not task.done and task.thread is not None:
                    raise AssertionError(f"{task.name} outlives its process")
                process.tasks.remove(task)
            process.tasks = [task for task in process.tasks if not task.done]
        self.processes = [process for process in self.processes if process.alive]

    def _resume(self, task: Task) -> None:
        if task.thread is None:
            task.thread = _Thread.idle.pop() if _Thread.idle else _Thread()
            task.thread.job = lambda: self._work(task)
        self._current = task
        thread = task.thread
        thread.go.release()
        thread.back.acquire()
        self._current = None

    def _work(self, task: Task) -> None:
        try:
            task.work()
        except Death:
            pass
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            self.fail(error)
        task.done = True

    # What the threads do.

    @property
    def current(self) -> Task | None:
        return self._current

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within, nothing stops: what the test itself looks at."""
        here, self._current = self._current, None
        try:
            yield
        finally:
            self._current = here

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def operation(self, what: str) -> Fault:
        """Stop here, before `what`, until the test goes on; what is to happen to it."""
        task = self._here()
        if task.budget <= 0:
            self._stop(task, None, None, what)
        self.steps += 1
        task.budget -= 1
        fault, task.fault = (task.fault, Fault.NONE) if task.budget <= 0 else (Fault.NONE, task.fault)
        until, general, part = task.process.outage
        return general if fault is Fault.NONE and self.now < until and part in what else fault

    def die(self) -> NoReturn:
        """Kill the process that is here."""
        self._here().process.alive = False
        raise Death

    def wait(self, until: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Stop until `until` holds, or `seconds` have passed."""
        task = self._here()
        wake = None if seconds is None else self.now + seconds

        def ready() -> bool:
            return until() or (wake is not None and self.now >= wake)

        while not ready():
            self._stop(task, ready, wake, what)

    def token(self, length: int) -> bytes:
        """Random bytes, the same in every run."""
        self._ids += 1
        return (self._ids * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 8 * length)).to_bytes(length, "big")

    def _here(self) -> Task:
        task = self._current
        assert task is not None, "a thread of no process"
        if not task.process.alive:
            raise Death
        return task

    def _stop(self, task: Task, until: Callable[[], bool] | None, wake: float | None, what: str) -> None:
        task.until, task.wake, task.at = until, wake, what
        assert task.thread is not None
        thread = task.thread
        thread.back.release()
        thread.go.acquire()
        task.until, task.wake = None, None
        if not task.process.alive:
            raise Death
