"""A check that goes step by step: each one's outcome is told as soon as it is known."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from chunkstore.errors import DeltasyncError


@dataclass(frozen=True, slots=True)
class Step:
    """One check. `server`: whose, None for what all have in common. `detail`: what was found, or what is wrong.

    `kind`, `hint`: of the error, if it failed.
    """

    name: str
    server: str | None
    outcome: Literal["ok", "failed", "skipped"]
    detail: str
    seconds: float = 0.0
    kind: str | None = None
    hint: str = ""


class Steps:
    """Does steps one after the other and tells each one's outcome; what needs one that failed is skipped."""

    def __init__(self, tell: Callable[[Step], None]) -> None:
        self._tell = tell
        self._missing: set[tuple[str | None, str]] = set()

    @property
    def ok(self) -> bool:
        """Whether all has been well so far."""
        return not self._missing

    async def do(
        self,
        name: str,
        work: Callable[[], Awaitable[str]],
        needs: tuple[str, ...] = (),
        server: str | None = None,
    ) -> None:
        """`work` returns what it found, or raises DeltasyncError. `needs`: names of earlier steps."""
        with self._telling(name, needs, server) as found:
            if found is not None:
                found.append(await work())

    def run(self, name: str, work: Callable[[], str], needs: tuple[str, ...] = ()) -> None:
        """`do` for work that nothing has to be awaited for."""
        with self._telling(name, needs, None) as found:
            if found is not None:
                found.append(work())

    @contextmanager
    def _telling(self, name: str, needs: tuple[str, ...], server: str | None) -> Iterator[list[str] | None]:
        """Tells the outcome of the block, which appends what it found; None where it is to do nothing."""
        lacking = [need for need in needs if {(server, need), (None, need)} & self._missing]
        began = time.perf_counter()
        found: list[str] = []
        try:
            yield None if lacking else found
        except DeltasyncError as error:
            seconds = time.perf_counter() - began
            step = Step(name, server, "failed", error.message, seconds, error.kind, error.hint)
        else:
            step = (
                Step(name, server, "skipped", f"needs: {', '.join(lacking)}")
                if lacking
                else Step(name, server, "ok", found[0], time.perf_counter() - began)
            )
        if step.outcome != "ok":
            self._missing.add((server, name))
        self._tell(step)
