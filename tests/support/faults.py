"""A store whose operations fail when a test says so, before or after they were carried out."""

from collections.abc import Callable, Iterator

from chunkstore.store import Buffer, ObjectInfo, Store

Fault = Callable[[str, str], Exception | None]


def never(operation: str, key: str) -> Exception | None:
    return None


class FaultStore(Store):
    """Asks `before(operation, key)` and `after(operation, key)`; raises what they return.

    `after` loses the reply: the operation has happened. A listing asks `before` ahead of every object.
    """

    def __init__(self, inner: Store, *, before: Fault = never, after: Fault = never) -> None:
        self._inner = inner
        self._before = before
        self._after = after

    @property
    def url(self) -> str:
        return self._inner.url

    def get(self, key: str, *, limit: int) -> bytes:
        self._ask(self._before, "get", key)
        data = self._inner.get(key, limit=limit)
        self._ask(self._after, "get", key)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._ask(self._before, "get_range", key)
        data = self._inner.get_range(key, start, length)
        self._ask(self._after, "get_range", key)
        return data

    def head(self, key: str) -> ObjectInfo | None:
        self._ask(self._before, "head", key)
        info = self._inner.head(key)
        self._ask(self._after, "head", key)
        return info

    def put(self, key: str, data: Buffer) -> None:
        self._ask(self._before, "put", key)
        self._inner.put(key, data)
        self._ask(self._after, "put", key)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        self._ask(self._before, "put_if_absent", key)
        created = self._inner.put_if_absent(key, data)
        self._ask(self._after, "put_if_absent", key)
        return created

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        for info in self._inner.list_after(prefix, after):
            self._ask(self._before, "list", info.key)
            yield info

    def delete(self, key: str) -> None:
        self._ask(self._before, "delete", key)
        self._inner.delete(key)
        self._ask(self._after, "delete", key)

    def temporaries(self) -> Iterator[ObjectInfo]:
        for info in self._inner.temporaries():
            self._ask(self._before, "list", info.key)
            yield info

    def delete_temporary(self, name: str) -> None:
        self._ask(self._before, "delete", name)
        self._inner.delete_temporary(name)
        self._ask(self._after, "delete", name)

    def _ask(self, fault: Fault, operation: str, key: str) -> None:
        error = fault(operation, key)
        if error is not None:
            raise error
