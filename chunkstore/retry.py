"""A store that repeats what failed in passing."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from chunkstore.errors import StoreUnavailable
from chunkstore.store import Buffer, ObjectInfo, Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off with full jitter; everything in seconds.

    Before the n-th retry (n = 0, 1, …) sleep uniformly between 0 and min(longest, first · 2ⁿ). A retry that would begin
    later than `deadline` after the operation began is not made. The three callables are the clock (monotonic), the
    sleep, and a source of uniform numbers in [0, 1).
    """

    first: float = 0.2
    longest: float = 5.0
    deadline: float = 60.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[], float] = random.random

    def wait(self, retry: int, began: float) -> float | None:
        """Seconds to sleep before retry number `retry` of an operation begun at time `began`; None if too late."""
        seconds = self.uniform() * min(self.longest, self.first * 2.0 ** min(retry, 60))
        return seconds if self.clock() + seconds - began <= self.deadline else None


def repeated(
    call: Callable[[], T],
    backoff: Backoff,
    on_retry: Callable[[StoreUnavailable], None] = lambda error: None,
) -> T:
    """What `call` returns once it does not raise StoreUnavailable; that error if it would be retried too late."""
    retry, began = 0, backoff.clock()
    while True:
        try:
            return call()
        except StoreUnavailable as error:
            _pause(backoff, error, retry, began, on_retry)
            retry += 1


def _pause(
    backoff: Backoff,
    error: StoreUnavailable,
    retry: int,
    began: float,
    on_retry: Callable[[StoreUnavailable], None],
) -> None:
    """Sleep before the next try, or raise `error` if that would come too late."""
    seconds = backoff.wait(retry, began)
    if seconds is None:
        raise error
    on_retry(error)
    backoff.sleep(seconds)


class RetryStore(Store):
    """Repeats every operation of `inner` that raises StoreUnavailable, except put_if_absent.

    A repeated put_if_absent could answer False to its own success; only the caller, who can compare bytes, may repeat
    that. `on_retry(operation, error)` is told of each retry before its pause.
    """

    def __init__(
        self,
        inner: Store,
        backoff: Backoff | None = None,
        *,
        on_retry: Callable[[str, StoreUnavailable], None] = lambda operation, error: None,
    ) -> None:
        self._inner = inner
        self._backoff = backoff or Backoff()
        self._on_retry = on_retry

    @property
    def url(self) -> str:
        return self._inner.url

    def get(self, key: str, *, limit: int) -> bytes:
        return self._repeat("get", lambda: self._inner.get(key, limit=limit))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._repeat("get_range", lambda: self._inner.get_range(key, start, length))

    def head(self, key: str) -> ObjectInfo | None:
        return self._repeat("head", lambda: self._inner.head(key))

    def put(self, key: str, data: Buffer) -> None:
        self._repeat("put", lambda: self._inner.put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._inner.put_if_absent(key, data)

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        retry, began = 0, self._backoff.clock()
        while True:
            try:
                for info in self._inner.list_after(prefix, after):
                    yield info
                    # Progress: a fault from here on is a new one, and listing goes on behind this key.
                    after, retry, began = info.key, 0, self._backoff.clock()
                return
            except StoreUnavailable as error:
                _pause(self._backoff, error, retry, began, partial(self._on_retry, "list"))
                retry += 1

    def delete(self, key: str) -> None:
        self._repeat("delete", lambda: self._inner.delete(key))

    def temporaries(self) -> Iterator[ObjectInfo]:
        return iter(self._repeat("list", lambda: list(self._inner.temporaries())))

    def delete_temporary(self, name: str) -> None:
        self._repeat("delete", lambda: self._inner.delete_temporary(name))

    def _repeat(self, operation: str, call: Callable[[], T]) -> T:
        return repeated(call, self._backoff, partial(self._on_retry, operation))
