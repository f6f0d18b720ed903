"""A store that lets only so many operations run at a time."""

import threading
from collections.abc import Iterator

from chunkstore.store import Buffer, ObjectInfo, Store


class LimitStore(Store):
    """At most `concurrency` operations of `inner` at once, whatever the number of calling threads; others wait.

    A listing takes part only while it fetches, not while its consumer works on what it yielded.
    """

    def __init__(self, inner: Store, concurrency: int) -> None:
        self._inner = inner
        self._slots = threading.BoundedSemaphore(concurrency)

    @property
    def url(self) -> str:
        return self._inner.url

    def get(self, key: str, *, limit: int) -> bytes:
        with self._slots:
            return self._inner.get(key, limit=limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._slots:
            return self._inner.get_range(key, start, length)

    def head(self, key: str) -> ObjectInfo | None:
        with self._slots:
            return self._inner.head(key)

    def put(self, key: str, data: Buffer) -> None:
        with self._slots:
            self._inner.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        with self._slots:
            return self._inner.put_if_absent(key, data)

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._limited(self._inner.list_after(prefix, after))

    def delete(self, key: str) -> None:
        with self._slots:
            self._inner.delete(key)

    def temporaries(self) -> Iterator[ObjectInfo]:
        return self._limited(self._inner.temporaries())

    def delete_temporary(self, name: str) -> None:
        with self._slots:
            self._inner.delete_temporary(name)

    def _limited(self, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        while True:
            with self._slots:
                info = next(infos, None)
            if info is None:
                return
            yield info
