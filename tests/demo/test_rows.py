"""The verdict and how it is shown."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from deltasync.demo.rows import PHASES, Comparison, Row, all_identical
from deltasync.demo.table import Display, summary

GOOD = Row(
    version=1,
    kind="delta",
    loss=0.25,
    reward=0.5,
    elements=1000,
    changed=10,
    chunk_bytes=50,
    dense_bytes=2000,
    seconds=dict.fromkeys(PHASES, 0.125),
    model_tensors=3,
    comparison=Comparison(3, 1200, ()),
)
ANCHOR = replace(
    GOOD, version=0, kind="anchor", loss=None, reward=None, changed=1000, seconds={"capture": 1.0}
)
DIFFERENT = replace(GOOD, comparison=Comparison(3, 1200, ("w differs in 1 of 9 elements",)))
INCOMPLETE = replace(GOOD, comparison=Comparison(2, 1200, ()))


def test_derived_figures() -> None:
    assert GOOD.identical
    assert GOOD.changed_percent == 1.0
    assert GOOD.times_smaller == 40.0
    assert (
        GOOD.to_json() | {"identical": True, "times_smaller": 40.0, "changed_percent": 1.0} == GOOD.to_json()
    )


@pytest.mark.parametrize("bad", [DIFFERENT, INCOMPLETE, replace(GOOD, model_tensors=4)])
def test_one_bad_row_fails_the_run(bad: Row) -> None:
    assert all_identical([ANCHOR, GOOD], versions=1)
    assert not bad.identical
    assert not all_identical([ANCHOR, bad], versions=1)
    assert not all_identical([bad, GOOD], versions=1)


def test_a_missing_version_fails_the_run() -> None:
    assert not all_identical([ANCHOR], versions=1)
    assert not all_identical([], versions=0)


@pytest.mark.parametrize(("terminal", "width"), [(True, 120), (True, 80), (False, 80)])
def test_display_shows_the_facts(terminal: bool, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    with Display(console, "title") as display:
        display.stage("waiting")
        display.add(ANCHOR)
        display.add(GOOD)
        display.add(DIFFERENT)
    text = out.getvalue()
    for expected in ("title", "0.25", "0.50", "1.00", "50 B", "40.0", "0.12", *PHASES, "yes", "NO"):
        assert expected in text
    assert "version 1: w differs in 1 of 9 elements" in text


def test_summary_counts_deltas_only() -> None:
    assert summary([ANCHOR, GOOD], "tensors compared", ok=True, seconds=9.6) == (
        "bit-identical: 2 versions, 6 tensors compared; deltas 50 B instead of 2.0 kB, 40 × smaller; 10 s in all"
    )
    assert summary([ANCHOR], "tensors compared", ok=False, seconds=1).startswith("NOT bit-identical")
