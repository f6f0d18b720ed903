"""Thousands of interleavings of the whole protocol, as hypothesis draws them (docs/adr/013-state-machine.md)."""

import os
from collections.abc import Callable

import pytest

from tests.machine.machine import Machine, explore, play
from tests.machine.scenarios import SCENARIOS

RUNS = int(os.environ.get("DELTASYNC_MACHINE_EXAMPLES", "80"))

REACHED = (
    "alternates",
    "applies",
    "commit unknown",
    "fault after",
    "fault before",
    "fault death",
    "fault denied",
    "fault taken",
    "gc deletions",
    "kills",
    "late writes",
    "refused versions",
    "subscribers restarted",
    "takeovers",
    "told attempt_abandoned",
    "told committed",
    "told fenced",
    "told unchanged",
)
"""What a machine comes across unless it has gone blind."""


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_written_down(scenario: Callable[[Machine], None]) -> None:
    play(scenario)


@pytest.mark.timeout(900)
def test_no_interleaving_breaks_an_invariant() -> None:
    Machine.totals.clear()
    Machine.runs.clear()
    unseen = set(REACHED)
    for _ in range(3):  # chance may leave one out once
        if unseen:
            explore(RUNS)
            unseen -= Machine.runs.keys()
    for name, count in sorted(Machine.totals.items()):
        print(f"{name}: {count}, in {Machine.runs[name]} runs")
    assert not unseen
