"""The store as one process sees it: a real MemoryStore, and whatever can come between.

It keeps no secrets: what was really done is told to a witness, in the order in which it was done.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol, TypeVar

from chunkstore.errors import AccessDenied, StoreUnavailable
from chunkstore.memory import MemoryStore
from chunkstore.store import Buffer, ObjectInfo, Store
from tests.machine.sim import Death, Fault, Process, Sim

T = TypeVar("T")

_PAGE: Final = 8
"""Keys that one request of a listing brings."""


class Witness(Protocol):
    """Sees everything that is done to the store. What it raises is the end of the run."""

    def said(self, key: str, data: bytes) -> None: ...

    def written(self, process: Process, key: str, data: bytes, before: bytes | None) -> None: ...

    def deleted(self, process: Process, info: ObjectInfo) -> None: ...

    def read(self, process: Process, key: str) -> None: ...


@dataclass
class Disk:
    """What all processes share. `late`: writes whose senders have long been told that they failed."""

    sim: Sim
    witness: Witness
    store: MemoryStore
    counts: Counter[str]
    late: list[Callable[[], object]] = field(default_factory=list)


class HostileStore(Store):
    """`damaged`: of keys that begin so, this process alone reads other bytes than there are."""

    def __init__(self, disk: Disk, process: Process, damaged: set[str] | None = None) -> None:
        self._disk = disk
        self._process = process
        self._damaged = damaged if damaged is not None else set()

    @property
    def url(self) -> str:
        return "memory://machine"

    def get(self, key: str, *, limit: int) -> bytes:
        data = self._do("get", key, lambda: self._read(key, limit))
        return data[:-1] + bytes([data[-1] ^ 1]) if key.startswith(tuple(self._damaged)) else data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._do("get_range", key, lambda: self._disk.store.get_range(key, start, length))

    def head(self, key: str) -> ObjectInfo | None:
        return self._do("head", key, lambda: self._disk.store.head(key))

    def put(self, key: str, data: Buffer) -> None:
        self._told(lambda: self._disk.witness.said(key, bytes(data)))
        self._do("put", key, lambda: self._put(key, bytes(data)), write=True)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._do("put_if_absent", key, lambda: self._create(key, bytes(data)), write=True)

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        while True:
            page = self._do("list", prefix, lambda after=after: self._page(prefix, after))  # type: ignore[misc]
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1].key

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self._delete(key), write=True)

    def temporaries(self) -> Iterator[ObjectInfo]:
        return self._disk.store.temporaries()

    def delete_temporary(self, name: str) -> None:
        self._disk.store.delete_temporary(name)

    def _do(self, what: str, key: str, effect: Callable[[], T], *, write: bool = False) -> T:
        sim = self._disk.sim
        fault = sim.operation(f"{what} {key}")
        if fault is Fault.LATE and not write:
            fault = Fault.AFTER
        if fault is not Fault.NONE:
            self._disk.counts[f"fault {fault.name.lower()}"] += 1
        name = f"{what} {self.url}/{key}"
        if fault is Fault.BEFORE:
            raise StoreUnavailable(f"{name}: 503")
        if fault is Fault.DENIED:
            raise AccessDenied(f"{name}: 403")
        if fault is Fault.LATE:
            self._disk.late.append(effect)
            raise StoreUnavailable(f"{name}: timed out")
        result = effect()
        if sim.error is not None:
            raise Death
        if fault is Fault.AFTER:
            raise StoreUnavailable(f"{name}: the reply was lost")
        if fault is Fault.TAKEN and result is True:
            return False  # type: ignore[return-value]
        if fault is Fault.DEATH:
            sim.die()
        return result

    def _read(self, key: str, limit: int) -> bytes:
        data = self._disk.store.get(key, limit=limit)
        self._told(lambda: self._disk.witness.read(self._process, key))
        return data

    def _put(self, key: str, data: bytes) -> None:
        before = self._peek(key)
        self._disk.store.put(key, data)
        self._told(lambda: self._disk.witness.written(self._process, key, data, before))

    def _create(self, key: str, data: bytes) -> bool:
        created = self._disk.store.put_if_absent(key, data)
        if created:
            self._told(lambda: self._disk.witness.written(self._process, key, data, None))
        return created

    def _page(self, prefix: str, after: str) -> list[ObjectInfo]:
        found = self._disk.store.list_after(prefix, after)
        return list(islice(found, _PAGE))

    def _delete(self, key: str) -> None:
        info = self._disk.store.head(key)
        self._disk.store.delete(key)
        if info is not None:
            self._told(lambda: self._disk.witness.deleted(self._process, info))

    def _peek(self, key: str) -> bytes | None:
        info = self._disk.store.head(key)
        return None if info is None else self._disk.store.get(key, limit=info.size)

    def _told(self, tell: Callable[[], None]) -> None:
        try:
            with self._disk.sim.aside():
                tell()
        except Exception as error:  # noqa: BLE001 - the code under test must not catch it
            self._disk.sim.fail(error)
