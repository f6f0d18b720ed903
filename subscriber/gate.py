"""Generation and writing exclude each other: many may serve at once, nobody serves while weights change."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from subscriber.errors import EngineNotReady


class Gate:
    """Closed at first. `serving()` waits until it is open; `close` waits until nobody serves any more."""

    def __init__(self, reason: str) -> None:
        self._changed = threading.Condition()
        self._serving = 0
        self._reason: str | None = reason
        self._own = threading.local()

    @property
    def reason(self) -> str | None:
        """Why the gate is closed; None if it is open."""
        return self._reason

    @contextmanager
    def serving(self, timeout: float | None = None) -> Iterator[None]:
        """Hold the gate open. May be nested in one thread.

        Raises EngineNotReady, saying why, if it is still closed after `timeout` seconds (None: wait for ever).
        """
        depth: int = getattr(self._own, "depth", 0)
        if depth == 0:
            self._enter(timeout)
        self._own.depth = depth + 1
        try:
            yield
        finally:
            self._own.depth = depth
            if depth == 0:
                with self._changed:
                    self._serving -= 1
                    self._changed.notify_all()

    def _enter(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._reason is not None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise EngineNotReady(
                        f"the engine serves nothing: {self._reason}", hint="see /status of the subscriber"
                    )
                self._changed.wait(left)
            self._serving += 1

    def close(self, reason: str) -> None:
        """Let nobody in any more and wait until everybody has left. Not from inside `serving()`."""
        with self._changed:
            self._reason = reason
            self._changed.wait_for(lambda: self._serving == 0)

    def open(self) -> None:
        with self._changed:
            self._reason = None
            self._changed.notify_all()
