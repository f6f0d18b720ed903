"""The state machine: hypothesis decides who does the next store operation, what goes wrong, who dies, what begins."""

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from manifest.keys import (
    ATTEMPTS,
    CHUNKS,
    PARTS,
    SUBSCRIBERS,
    VERSIONS,
    parse_attempt_key,
    version_name,
)
from tests.machine.actors import GRACE, Trainer, Watcher, World, collect, first_weights, store_whole
from tests.machine.ledger import Version, Weights
from tests.machine.sim import Fault, Process, Task
from tests.machine.virtual import virtual

T = TypeVar("T")

TRAINERS: Final = 2
WATCHERS: Final = 2
STEPS: Final = 40
"""Rules per run."""

MISHAPS: Final = (
    "kill", "kill", "come back", "roll back", "cut off", "freeze", "freeze", "land", "damage", "damage", "disturb"
)  # fmt: skip

_any = st.integers(0, 1000)
_back = st.sampled_from([0, 0, 1, 2, 4])
_outage = st.tuples(
    st.sampled_from([5.0, 70.0, 200.0]),
    st.sampled_from([Fault.BEFORE, Fault.AFTER, Fault.LATE, Fault.DENIED]),
    st.sampled_from(["", VERSIONS, VERSIONS, CHUNKS, SUBSCRIBERS]),
)
_outages = st.none() | st.none() | _outage
_upkeep = st.sampled_from(["gc", "gc", "compact", "compact", "nothing"])
_seconds = st.sampled_from([1.0, 10.0, GRACE / 2 + 1, GRACE + 1, 2 * GRACE])
_faults = st.sampled_from(
    [Fault.NONE] * 6 + [Fault.BEFORE, Fault.AFTER, Fault.LATE, Fault.TAKEN, Fault.DENIED, Fault.DEATH]
)
_turns = st.tuples(st.integers(0, 30), st.integers(1, 20), _faults)
_then = st.tuples(st.lists(_turns, max_size=8), st.sampled_from([0, 0, 10, 60, 150]))

Outage = tuple[float, Fault, str]
Turn = tuple[int, int, Fault]
Then = tuple[list[Turn], int]


def of_version(version: int) -> str:
    """What the keys of all its chunks begin with."""
    return f"{CHUNKS}{version_name(version)}/"


def pick(some: Sequence[T], number: int) -> T:
    return some[number % len(some)]


class Machine(RuleBasedStateMachine):
    """One stream and all that may happen to it."""

    totals: ClassVar[Counter[str]] = Counter()
    """How often what has happened, in all runs."""
    runs: ClassVar[Counter[str]] = Counter()
    """In how many runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        scratch = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
        directory = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="machine-", dir=scratch))
        self.counts: Counter[str] = Counter(runs=1)
        self.world = World(Path(directory), self.counts)
        self.sim = self.world.sim
        self.trainers: list[Trainer] = []
        self.watchers: list[Watcher] = []

    # Whose turn it is.

    @rule(then=_then)
    def go_on(self, then: Then) -> None:
        """Some turns as they are drawn, then all go on for a while, and nothing goes wrong."""
        turns, operations = then
        for number, steps, fault in turns:
            tasks = self.awake(120.0)
            if tasks:
                self.turn(pick(tasks, number), steps, fault)
        self.drain(operations, seconds=60.0)

    # What begins, dies, or is cut off.

    @initialize(size=st.integers(1, 2))
    def first(self, size: int) -> None:
        self.start_trainer(size, 0, False, ([], 60))

    @precondition(lambda self: len(self.running()) < TRAINERS)
    @rule(size=st.sampled_from([1, 1, 2, 3]), back=_back, takeover=st.booleans(), then=_then)
    def start_trainer(self, size: int, back: int, takeover: bool, then: Then) -> None:
        """From the weights of the version that is the newest, or was so many versions ago."""
        name = f"trainer.{len(self.trainers)}"
        self.trainers.append(Trainer(self.world, name, self.weights_of(back), size, takeover=takeover))
        self.counts["trainers"] += 1
        self.go_on(then)

    @precondition(lambda self: self.ready())
    @rule(number=_any, what=_any, anchor=st.booleans(), outage=_outages, then=_then)
    def publish(self, number: int, what: int, anchor: bool, outage: Outage | None, then: Then) -> None:
        """One step of training, and one version."""
        trainer = pick(self.ready(), number)
        trainer.train(what)
        trainer.publish(anchor=anchor)
        self.counts["publishes"] += 1
        if outage is not None:
            self.cut_off(pick(trainer.ranks, number).process, outage)
        self.go_on(then)

    @precondition(lambda self: self.ready())
    @rule(number=_any, whats=st.lists(_any, max_size=3), thens=st.lists(_then, min_size=1, max_size=2))
    def publish_often(self, number: int, whats: list[int], thens: list[Then]) -> None:
        """Steps and versions as fast as they go, those before perhaps still on their way."""
        trainer = pick(self.ready(), number)
        for then in thens:
            self.counts["steps of training"] += sum(trainer.train(what) for what in whats)
            self.counts["publishes"] += trainer.publish(anchor=False)
            self.go_on(then)

    @rule(number=st.integers(0, WATCHERS - 1), keep=st.booleans(), then=_then)
    def start_watcher(self, number: int, keep: bool, then: Then) -> None:
        if number >= len(self.watchers):
            self.watchers.append(Watcher(self.world, len(self.watchers)))
        elif not self.watchers[number].alive:
            self.watchers[number].start(keep=keep)
            self.counts["subscribers restarted"] += 1
        self.go_on(then)

    @rule(upkeep=_upkeep, back=_back, seconds=_seconds, then=_then)
    def tend(self, upkeep: str, back: int, seconds: float, then: Then) -> None:
        """What an operator's timers do, or nothing: only time passes."""
        if self.world.ledger.versions and upkeep == "gc":
            collect(self.world, 1 + back)
        elif self.world.ledger.versions and upkeep == "compact":
            store_whole(self.world, self.version_of(back).manifest.version)
        else:
            self.sim.now += seconds
        self.go_on(then)

    @rule(mishap=st.sampled_from(MISHAPS), number=_any, back=_back, outage=_outage)
    def suffer(self, mishap: str, number: int, back: int, outage: Outage) -> None:
        """One thing goes wrong, if there is what it can happen to."""
        if mishap == "kill" and self.sim.processes:
            self.kill(pick(self.sim.processes, number))
        elif mishap == "come back" and self.halves():
            self.restart_rank(pick(self.halves(), number))
        elif mishap == "come back" and any(t.size > 1 for t in self.running()):
            self.kill(pick([r for t in self.running() if t.size > 1 for r in t.ranks], number).process)
        elif mishap == "roll back" and self.running():
            self.roll_back(pick(self.running(), number), back)
        elif mishap == "cut off" and self.sim.processes:
            self.cut_off(pick(self.sim.processes, number), outage)
        elif mishap == "freeze" and self.sim.processes:
            pick(self.sim.processes, number).frozen = self.sim.now + outage[0]
            self.counts["frozen"] += 1
        elif mishap == "land" and self.world.disk.late:
            self.land(number)
        elif mishap == "damage" and self.watchers:
            newest = self.world.ledger.newest
            pick(self.watchers, number).damaged |= {of_version(max(0, newest - back) + n) for n in range(4)}
        elif mishap == "disturb" and any(w.version is not None for w in self.watchers):
            pick([w for w in self.watchers if w.version is not None], number).disturb(number % 40)
            self.counts["disturbed engines"] += 1

    def kill(self, process: Process) -> None:
        for task in process.tasks:
            if task.at.startswith("subscriber."):  # a crash point
                self.counts[f"killed at {task.at}"] += 1
        self.sim.kill(process)
        self.counts["kills"] += 1

    def restart_rank(self, trainer: Trainer) -> None:
        """One rank of several comes back into the same run."""
        if trainer.quiet():
            trainer.restart()
            self.counts["ranks restarted"] += 1

    def roll_back(self, trainer: Trainer, back: int) -> None:
        """A trainer reloads an older checkpoint and goes on."""
        if trainer.quiet():
            trainer.model.load(self.weights_of(back))
            self.counts["rollbacks"] += 1

    def cut_off(self, process: Process, outage: Outage) -> None:
        """It gets no answers for a while, or none about some keys."""
        seconds, fault, part = outage
        process.outage = (self.sim.now + seconds, fault, part)
        self.counts["outages"] += 1

    def land(self, number: int) -> None:
        """A write whose sender has given it up arrives."""
        late = self.world.disk.late
        late.pop(number % len(late))()
        self.check()
        self.counts["late writes"] += 1

    # What the rules choose from.

    def running(self) -> list[Trainer]:
        return [trainer for trainer in self.trainers if trainer.alive]

    def ready(self) -> list[Trainer]:
        """Trainers that can publish."""
        return [t for t in self.running() if t.quiet() and any(rank.ready for rank in t.ranks)]

    def halves(self) -> list[Trainer]:
        """Trainers of which some ranks are dead."""
        return [t for t in self.running() if not all(rank.process.alive for rank in t.ranks)]

    def version_of(self, back: int) -> Version:
        return self.world.ledger.versions[max(0, self.world.ledger.newest - back)]

    def weights_of(self, back: int) -> Weights:
        return self.version_of(back).weights if self.world.ledger.versions else first_weights()

    # What is always true.

    def turn(self, task: Task, operations: int, fault: Fault = Fault.NONE) -> None:
        self.counts["turns"] += 1
        self.sim.run(task, operations, fault)
        self.check()

    def check(self) -> None:
        if self.sim.error is not None:
            raise self.sim.error
        for watcher in self.watchers:
            watcher.check()

    def awake(self, seconds: float) -> list[Task]:
        """Who can go on; where all are asleep, time passes, up to `seconds`."""
        tasks, wake = self.sim.runnable(), self.sim.next_wake()
        if tasks or wake is None or wake > self.sim.now + seconds:
            return tasks
        self.sim.now = wake + 0.001  # so that nobody is a rounding error short of it
        return self.sim.runnable()

    def drain(self, operations: int, until: Callable[[], bool] = lambda: False, seconds: float = 0.0) -> None:
        """Everybody in turn, letting time pass up to `seconds` where all are asleep."""
        end, last = self.sim.now + seconds, self.sim.steps + operations
        while self.sim.steps < last and not until():
            tasks = self.awake(end - self.sim.now)
            for task in tasks:
                if not task.done and task.process.alive:
                    self.turn(task, 8)
            if not tasks:
                return

    def teardown(self) -> None:
        try:
            if self.sim.error is None:
                self.finish()
        finally:
            for process in list(self.sim.processes):
                self.sim.kill(process)
            self.counts["operations"] += self.sim.steps
            self.totals.update(self.counts)
            self.runs.update(name for name, count in self.counts.items() if count)
            self.stack.close()

    def finish(self) -> None:
        """The faults end. Then a trainer can publish, all subscribers come to that, and all garbage can go."""
        for process in self.sim.processes:
            process.outage, process.frozen = (0.0, Fault.NONE, ""), 0.0
        for watcher in self.watchers:
            watcher.damaged &= {of_version(version) for version in range(len(self.world.ledger.versions))}
        while self.world.disk.late:
            self.land(0)
        for trainer in self.trainers:
            for rank in trainer.ranks:
                self.sim.kill(rank.process)
        for number in range(WATCHERS):
            self.start_watcher(number, True, ([], 0))
        version = self._publish_at_last()
        watchers = self.watchers
        self.drain(20_000, lambda: all(w.version == version for w in watchers), 1000.0)
        assert all(w.version == version for w in watchers), f"{[w.version for w in watchers]}, not {version}"
        self._collect_at_last(version)
        self.counts["finished"] += 1

    def _publish_at_last(self) -> int:
        ledger = self.world.ledger
        trainer = Trainer(self.world, "last", first_weights(), 1, takeover=True)
        self.drain(5000, trainer.quiet, 300.0)
        trainer.model.nudge(5)
        assert trainer.publish(anchor=any(w.damaged for w in self.watchers)), "nobody can publish"
        step = max(ledger.published)
        self.drain(5000, lambda: any(v.manifest.train_step == step for v in ledger.versions), 300.0)
        newest = ledger.versions[-1].manifest
        assert newest.train_step == step, "the last version is not committed"
        return newest.version

    def _collect_at_last(self, version: int) -> None:
        for _ in range(2):  # the first anchor has to settle
            self._wait_for(store_whole(self.world, version))
            self.sim.now += 2 * GRACE
            self.drain(5000, seconds=100.0)
        self._wait_for(collect(self.world, 1))
        store, named = self.world.ledger.store, self.world.ledger.named(version)
        left = [o.key for p in (CHUNKS, PARTS, ATTEMPTS) for o in store.list_after(p)]
        leaked = [k for k in left if k not in named and (parse_attempt_key(k) or (0, ""))[0] <= version]
        assert not leaked, f"out of garbage collection's reach: {leaked}"
        self.world.ledger.check_restorable(version)

    def _wait_for(self, process: Process) -> None:
        self.drain(5000, lambda: not process.alive, 60.0)


def explore(examples: int, *, steps: int = STEPS, shrink: bool = True) -> None:
    """Run so many runs of the machine, of so many rules each; raises what the first broken invariant says."""
    phases = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else [])]
    logging.disable(logging.CRITICAL)
    try:
        with virtual(World.open_store):
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=steps,
                    deadline=None,
                    phases=phases,
                    suppress_health_check=list(HealthCheck),
                ),
            )
    finally:
        logging.disable(logging.NOTSET)


def play(scenario: Callable[[Machine], None]) -> None:
    """One run whose decisions are written down; it ends as all others do."""
    with virtual(World.open_store):
        machine = Machine()
        try:
            scenario(machine)
        except BaseException:
            machine.sim.error = machine.sim.error or AssertionError("it ends here")
            raise
        finally:
            machine.teardown()
