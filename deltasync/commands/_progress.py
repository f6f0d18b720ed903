"""What a command says on stderr while a store keeps it waiting.

That it asks again, and a progress bar for what it reads, if that is a terminal and rich is installed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from chunkstore.errors import DeltasyncError
from chunkstore.metrics import StoreMetrics


class Patience(StoreMetrics):
    """Counters of a store that also say, once, that it does not answer: until a command gives up, a minute may pass."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def retried(self, operation: str, error: DeltasyncError) -> None:
        super().retried(operation, error)
        if not self._said:
            self._said = True
            print(f"waiting: {error.message}; asking again", file=sys.stderr, flush=True)


class Transfer(Patience):
    """Counters of a store that also tell `advance` about object bytes as they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = False
        self.advance: Callable[[int], None] = lambda _: None
        self.expect: Callable[[int], None] = lambda _: None
        """Say how many bytes will be read in all, once that is known."""

    def called(
        self, operation: str, seconds: float, *, read: int = 0, written: int = 0, error: str | None = None
    ) -> None:
        super().called(operation, seconds, read=read, written=written, error=error)
        self.advance(read)


@contextmanager
def transfer(title: str) -> Iterator[Transfer]:
    """Metrics to open a store with; while inside, what is read through it moves a bar named `title`."""
    counted = Transfer()
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield counted
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        counted.shown = True
        counted.advance = lambda nbytes: bar.advance(task, nbytes)
        counted.expect = lambda nbytes: bar.update(task, total=nbytes)
        yield counted
