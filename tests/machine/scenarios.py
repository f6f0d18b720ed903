"""Runs that chance finds too seldom, written down: the machine's own processes, faults and invariants, no drawing."""

from collections.abc import Callable
from typing import Final

from manifest.keys import VERSIONS, manifest_key
from tests.machine.actors import GRACE, collect, store_whole
from tests.machine.machine import Machine
from tests.machine.sim import Fault, Process, Task


def torn(machine: Machine) -> None:
    """A subscriber is killed between two tensors of an apply, and comes back over the same weights."""
    _begin(machine)
    machine.running()[0].train(0)
    machine.publish(0, 1, False, None, ([], 0))
    watcher = machine.watchers[0]
    _run_to(machine, lambda task: task.at == "subscriber.mid_scatter")
    assert watcher.process is not None
    machine.kill(watcher.process)
    machine.start_watcher(0, True, ([], 0))
    machine.drain(1000, lambda: watcher.version == 1, 300.0)
    assert watcher.version == 1


def disturbed(machine: Machine) -> None:
    """Somebody writes what an anchor has just written, before all of it is there: only a look afterwards tells."""
    machine.start_trainer(1, 0, False, ([], 100))
    machine.start_watcher(0, True, ([], 0))
    watcher = machine.watchers[0]
    _run_to(machine, lambda task: task.at == "subscriber.mid_scatter")
    watcher.disturb(39)
    machine.drain(1000, lambda: watcher.version == 0, 300.0)
    assert watcher.version == 0
    assert not watcher.disturbed


def drifted(machine: Machine) -> None:
    """Somebody writes an element that no later version touches: the next audit sees it."""
    _begin(machine)
    watcher = machine.watchers[0]
    watcher.disturb(39)
    for number in range(1, 9, 2):
        machine.publish(0, number, False, None, ([], 100))
    assert watcher.version == 4
    assert not watcher.disturbed


def behind(machine: Machine) -> None:
    """A subscriber that sees no new versions keeps its lease on what it needs to go on, whatever else is stored."""
    _begin(machine)
    watcher = machine.watchers[0]
    assert watcher.process is not None
    watcher.process.outage = (float("inf"), Fault.BEFORE, VERSIONS)
    for number in range(2):
        machine.publish(0, number, False, None, ([], 100))
    _finish(machine, store_whole(machine.world, 2))
    machine.drain(1000, seconds=3 * GRACE)
    _finish(machine, collect(machine.world, 1))
    assert watcher.version == 0


def denied(machine: Machine) -> None:
    """A manifest is on its way for long, its commit is unknown, the next try is denied; then the manifest arrives."""
    _begin(machine)
    rank = machine.running()[0].ranks[0]
    machine.publish(0, 0, False, None, ([], 0))
    _run_to(machine, lambda task: task.at == f"put_if_absent {manifest_key(1)}")
    rank.process.outage = (machine.sim.now + 40.0, Fault.LATE, manifest_key(1))
    machine.drain(1000, seconds=60.0)
    assert machine.counts["commit unknown"] == 1
    rank.process.outage = (machine.sim.now + 5.0, Fault.DENIED, f"put_if_absent {manifest_key(1)}")
    machine.publish(0, 1, False, None, ([], 60))
    machine.land(0)
    machine.drain(1000, seconds=60.0)
    machine.publish(0, 2, False, None, ([], 150))
    assert machine.world.ledger.newest == 3
    assert not machine.counts["told fenced"]


SCENARIOS: Final[tuple[Callable[[Machine], None], ...]] = (torn, disturbed, drifted, behind, denied)


def _begin(machine: Machine) -> None:
    """One trainer, one subscriber, version 0."""
    machine.start_trainer(1, 0, False, ([], 100))
    machine.start_watcher(0, True, ([], 100))
    assert machine.watchers[0].version == 0


def _run_to(machine: Machine, there: Callable[[Task], bool]) -> None:
    """Everybody in turn, one step each, until some thread stops there."""
    for _ in range(1000):
        for task in machine.awake(60.0):
            if not task.done:
                machine.turn(task, 1)
            if not task.done and there(task):
                return
    raise AssertionError("nobody gets there")


def _finish(machine: Machine, process: Process) -> None:
    machine.drain(1000, lambda: not process.alive, 60.0)
    assert not process.alive
