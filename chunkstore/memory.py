"""A store in this process's memory, for tests and trials."""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator

from chunkstore.errors import CorruptObject, InvalidKey, LimitExceeded, ObjectMissing
from chunkstore.store import Buffer, ObjectInfo, Store, check_key, check_prefix

_named: dict[str, "MemoryStore"] = {}
_named_lock = threading.Lock()


class MemoryStore(Store):
    """Objects in a dict. `clock` gives the Unix seconds that `ObjectInfo.modified` reports."""

    def __init__(self, name: str = "", *, clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._clock = clock
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> "MemoryStore":
        """The one store of that name in this process, created empty when first asked for."""
        with _named_lock:
            return _named.setdefault(name, cls(name))

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def get(self, key: str, *, limit: int) -> bytes:
        data = self._read("get", key)
        if len(data) > limit:
            raise LimitExceeded(f"get {self.url}/{key}: {len(data)} bytes, more than the limit of {limit}")
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._read("get_range", key)
        if start + length > len(data):
            raise CorruptObject(
                f"get_range {self.url}/{key}: the object ends at byte {len(data)}, before byte {start + length}"
            )
        return data[start : start + length]

    def head(self, key: str) -> ObjectInfo | None:
        check_key(key)
        with self._lock:
            held = self._objects.get(key)
        return None if held is None else ObjectInfo(key, len(held[0]), held[1])

    def put(self, key: str, data: Buffer) -> None:
        held = (bytes(data), self._clock())
        check_key(key)
        with self._lock:
            self._objects[key] = held

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        held = (bytes(data), self._clock())
        check_key(key)
        with self._lock:
            return self._objects.setdefault(key, held) is held

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix))
        for key in keys[bisect_right(keys, after) :]:
            info = self.head(key)
            if info is not None:
                yield info

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def temporaries(self) -> Iterator[ObjectInfo]:
        return iter(())

    def delete_temporary(self, name: str) -> None:
        raise InvalidKey(f"{self.url}/{name}: this store has no temporaries")

    def _read(self, operation: str, key: str) -> bytes:
        check_key(key)
        with self._lock:
            held = self._objects.get(key)
        if held is None:
            raise ObjectMissing(f"{operation} {self.url}/{key}: there is no such object")
        return held[0]
