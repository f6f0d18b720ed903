"""A store that counts, and the counters. Plain Python: the daemons turn snapshots into what they export."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from chunkstore.errors import DeltasyncError
from chunkstore.store import Buffer, ObjectInfo, Store


@dataclass(frozen=True, slots=True)
class OperationStats:
    """What one kind of operation did since the start of the process.

    `calls` counts completed calls, failed ones included; `seconds` is their time, waiting for a slot and for retries
    included; `bytes_read` and `bytes_written` count object bytes of successful calls; `errors` and `retries` count by
    the error's `kind`: an error reached the caller, a retry did not.
    """

    calls: int
    seconds: float
    bytes_read: int
    bytes_written: int
    errors: Mapping[str, int]
    retries: Mapping[str, int]


@dataclass(slots=True)
class _Counters:
    calls: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    errors: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    retries: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class StoreMetrics:
    """Counters by operation name: get, get_range, head, put, put_if_absent, list, delete. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[str, _Counters] = defaultdict(_Counters)

    def snapshot(self) -> dict[str, OperationStats]:
        """The counters now, of every operation that was called; later calls do not change what is returned."""
        with self._lock:
            return {
                operation: OperationStats(
                    counters.calls,
                    counters.seconds,
                    counters.bytes_read,
                    counters.bytes_written,
                    MappingProxyType(dict(counters.errors)),
                    MappingProxyType(dict(counters.retries)),
                )
                for operation, counters in self._counters.items()
            }

    def retried(self, operation: str, error: DeltasyncError) -> None:
        """Count one retry; made to be a RetryStore's `on_retry`."""
        with self._lock:
            self._counters[operation].retries[error.kind] += 1

    def called(
        self, operation: str, seconds: float, *, read: int = 0, written: int = 0, error: str | None = None
    ) -> None:
        """Count one completed call and, if it failed, the kind of its error."""
        with self._lock:
            counters = self._counters[operation]
            counters.calls += 1
            counters.seconds += seconds
            counters.bytes_read += read
            counters.bytes_written += written
            if error is not None:
                counters.errors[error] += 1


class MetricsStore(Store):
    """Counts every operation of `inner` in `metrics`; `clock` is monotonic, in seconds."""

    def __init__(
        self, inner: Store, metrics: StoreMetrics, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._inner = inner
        self._metrics = metrics
        self._clock = clock

    @property
    def url(self) -> str:
        return self._inner.url

    def get(self, key: str, *, limit: int) -> bytes:
        with self._counted("get") as call:
            data = self._inner.get(key, limit=limit)
            call.read = len(data)
            return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._counted("get_range") as call:
            data = self._inner.get_range(key, start, length)
            call.read = len(data)
            return data

    def head(self, key: str) -> ObjectInfo | None:
        with self._counted("head"):
            return self._inner.head(key)

    def put(self, key: str, data: Buffer) -> None:
        with self._counted("put") as call:
            self._inner.put(key, data)
            call.written = memoryview(data).nbytes

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        with self._counted("put_if_absent") as call:
            created = self._inner.put_if_absent(key, data)
            call.written = memoryview(data).nbytes if created else 0
            return created

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._listed(self._inner.list_after(prefix, after))

    def delete(self, key: str) -> None:
        with self._counted("delete"):
            self._inner.delete(key)

    def temporaries(self) -> Iterator[ObjectInfo]:
        return self._listed(self._inner.temporaries())

    def delete_temporary(self, name: str) -> None:
        with self._counted("delete"):
            self._inner.delete_temporary(name)

    def _listed(self, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        """Counted as one call when the listing ends, with the time it fetched, not the time its consumer took."""
        seconds = 0.0
        error: str | None = None
        try:
            while True:
                began = self._clock()
                try:
                    info = next(infos, None)
                finally:
                    seconds += self._clock() - began
                if info is None:
                    return
                yield info
        except DeltasyncError as failed:
            error = failed.kind
            raise
        finally:
            self._metrics.called("list", seconds, error=error)

    @contextmanager
    def _counted(self, operation: str) -> Iterator["_Call"]:
        call = _Call()
        error: str | None = None
        began = self._clock()
        try:
            yield call
        except DeltasyncError as failed:
            error = failed.kind
            raise
        finally:
            self._metrics.called(
                operation, self._clock() - began, read=call.read, written=call.written, error=error
            )


@dataclass(slots=True)
class _Call:
    """Object bytes that one call read and wrote."""

    read: int = 0
    written: int = 0
