"""Show the rows as they come: a live table on a terminal, a line per version anywhere else."""

from collections.abc import Sequence
from itertools import zip_longest
from types import TracebackType
from typing import Final, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from chunkstore.words import human_bytes
from deltasync.demo.rows import PHASES, Row

_FACTS: Final = ("ver-\nsion", "loss", "reward", "changed\n%", "sent", "times\nsmaller")
_WIDE: Final = 110
"""Columns of a terminal that has room for every phase side by side; on others they stand in pairs."""


class Display:
    """Use as a context manager; `stage` says what is going on, `add` shows a finished version."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._rows: list[Row] = []
        self._live = (
            Live(console=console, auto_refresh=True, transient=False) if console.is_terminal else None
        )

    def __enter__(self) -> Self:
        if self._live is None:
            self._console.print(self._title, highlight=False)
        else:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()

    def stage(self, text: str) -> None:
        """Say what the demo is waiting for (terminals only)."""
        if self._live is not None:
            self._live.update(Group(self._table(), Spinner("dots", text)))

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if self._live is None:
            self._console.print(plain_line(row), highlight=False, soft_wrap=True)
        for problem in row.comparison.problems[:10]:
            self._console.print(f"version {row.version}: {problem}", style="red", highlight=False)

    def _table(self) -> RenderableType:
        wide = self._console.width >= _WIDE
        table = Table(title=self._title, box=SIMPLE_HEAD, padding=0, show_edge=False)
        table.caption = (
            "seconds per phase: capture … commit in the publisher, detect … pause in the subscriber"
        )
        for name in (*_FACTS, *_phases(PHASES, wide), "same\nbits"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*cells(row, wide), style=None if row.identical else "bold red")
        return table


def cells(row: Row, wide: bool) -> list[str | Text]:
    """The row's cells, in the order of the table's columns."""
    seconds = [f"{row.seconds[phase]:.2f}" if phase in row.seconds else "–" for phase in PHASES]
    return [
        str(row.version),
        "–" if row.loss is None else f"{row.loss:.2f}",
        "–" if row.reward is None else f"{row.reward:.2f}",
        f"{row.changed_percent:.2f}",
        human_bytes(row.chunk_bytes),
        f"{row.times_smaller:.1f}",
        *_phases(seconds, wide),
        Text("yes", "green") if row.identical else Text("NO", "bold red"),
    ]


def _phases(texts: Sequence[str], wide: bool) -> list[str]:
    """One text per column, or two, one above the other."""
    return (
        list(texts) if wide else [f"{a}\n{b}" for a, b in zip_longest(texts[::2], texts[1::2], fillvalue="")]
    )


def plain_line(row: Row) -> str:
    """One line with the same facts, for logs."""
    learned = (
        "" if row.loss is None or row.reward is None else f" loss {row.loss:.3f} reward {row.reward:.2f}"
    )
    phases = " ".join(f"{phase} {row.seconds[phase]:.2f}" for phase in PHASES if phase in row.seconds)
    return (
        f"version {row.version} ({row.kind}):{learned} changed {row.changed_percent:.2f} %"
        f" sent {human_bytes(row.chunk_bytes)}, {row.times_smaller:.1f} × smaller than dense; seconds: {phases};"
        f" {row.comparison.tensors} of {row.model_tensors} tensors compared,"
        f" bit-identical: {'yes' if row.identical else 'NO'}"
    )


def summary(rows: Sequence[Row], compared: str, *, ok: bool, seconds: float) -> str:
    """The last words: verdict, sizes and time. `compared`: what is counted as one comparison, and with what."""
    deltas = [row for row in rows if row.kind == "delta"]
    sent, dense = sum(row.chunk_bytes for row in deltas), sum(row.dense_bytes for row in deltas)
    verdict = "bit-identical" if ok else "NOT bit-identical"
    count = sum(row.comparison.tensors for row in rows)
    saved = (
        f"; deltas {human_bytes(sent)} instead of {human_bytes(dense)}, {dense / sent:.0f} × smaller"
        if sent
        else ""
    )
    return f"{verdict}: {len(rows)} versions, {count} {compared}{saved}; {seconds:.0f} s in all"
