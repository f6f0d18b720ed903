"""Fetched chunks on local disk: a fetch that was interrupted, came early, or was another engine's is not repeated."""

import mmap
import os
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from chunkstore.codec import ChunkReader
from chunkstore.crashpoints import crash_point
from chunkstore.errors import CorruptObject, LimitExceeded
from chunkstore.store import Store
from manifest.catalog import Catalog
from manifest.fetch import open_chunk
from manifest.schema import ChunkRef
from subscriber.disk import disk_errors
from subscriber.errors import StagedLost

_SUFFIX: Final = ".chunk"


@dataclass(slots=True, eq=False)
class Share:
    """What one engine needs: the chunks `wanted`, by hash, and soon perhaps those of versions after `reached`."""

    wanted: set[bytes] = field(default_factory=set)
    reached: int = -1


class Spool:
    """Chunks by their hash in `directory`, for all engines of a daemon.

    `spare_bytes`: how much that no engine wants stays for one that has not reached its version yet. Every method may
    be called from any thread.
    """

    def __init__(self, store: Store, directory: Path, spare_bytes: int = 0) -> None:
        self._store = store
        self._directory = directory
        self._spare_bytes = spare_bytes
        self._lock = threading.Lock()
        self._shares: list[Share] = []
        self._versions: dict[str, int] = {}  # of chunks, by file name
        self._writing: set[str] = set()  # names of files that are not complete yet
        self._turns: WeakValueDictionary[bytes, threading.Lock] = WeakValueDictionary()

    def share(self) -> Share:
        """The share of one more engine."""
        share = Share()
        with self._lock:
            self._shares.append(share)
        return share

    def has(self, ref: ChunkRef) -> bool:
        """Whether the chunk was fetched; it is checked again when it is opened."""
        try:
            return self._path(ref).stat().st_size == ref.nbytes
        except OSError:  # whatever is wrong is met, and named, when it is written
            return False

    def fetch(self, ref: ChunkRef, catalog: Catalog, version: int, share: Share) -> int:
        """Bring the chunk, one of `version`, here unless it is, checked as `manifest.fetch` does. `share` wants it now.

        Holds one chunk in memory. Returns the bytes fetched. Raises what the store does, CorruptObject naming the
        key, StagingFull, StagingUnavailable.
        """
        with self._lock:
            share.wanted.add(ref.hash)
            self._versions[self._path(ref).name] = version
            turn = self._turns.setdefault(ref.hash, threading.Lock())
        with turn:  # whoever comes second waits, and finds it here
            return 0 if self.has(ref) else self._download(ref, catalog)

    def open(self, ref: ChunkRef, catalog: Catalog) -> ChunkReader:
        """The fetched chunk, mapped rather than read into memory.

        Raises StagedLost, after removing it, if it is not what was fetched.
        """
        path = self._path(ref)
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return open_chunk(memoryview(data), ref, catalog, str(path))
        except (OSError, ValueError, CorruptObject) as error:  # ValueError: an empty file cannot be mapped
            path.unlink(missing_ok=True)
            raise StagedLost(
                f"fetched chunk {path} cannot be used: {error}", hint="it is fetched again by itself"
            ) from error

    def keep(self, share: Share, hashes: Collection[bytes], reached: int) -> None:
        """`share` wants only these, and nothing else up to version `reached`; remove what nobody needs any more.

        Raises StagingUnavailable.
        """
        with self._lock, disk_errors(self._directory):
            share.wanted, share.reached = set(hashes), reached
            wanted = {value.hex() + _SUFFIX for other in self._shares for value in other.wanted}
            last = min(other.reached for other in self._shares)
            spare = self._spare_bytes
            for path in self._directory.glob("*"):
                if path.name in wanted or path.name in self._writing:
                    continue
                # Of unknown version: left by an earlier process, so whoever has reached nothing yet may need it.
                ahead = path.suffix == _SUFFIX and self._versions.get(path.name, 0) > last
                if ahead and (size := _size(path)) <= spare:
                    spare -= size
                    continue
                path.unlink(missing_ok=True)
                self._versions.pop(path.name, None)

    def missing_bytes(self, refs: Iterable[ChunkRef]) -> int:
        """Bytes that fetching `refs` will add here."""
        return sum(ref.nbytes for ref in refs if not self.has(ref))

    def _download(self, ref: ChunkRef, catalog: Catalog) -> int:
        name = f"{self._store.url}/{ref.key}"
        try:
            data = self._store.get(ref.key, limit=ref.nbytes)
        except LimitExceeded as error:
            raise CorruptObject(
                f"{name} is larger than the {ref.nbytes} bytes its manifest promises", hint=error.hint
            ) from error
        open_chunk(data, ref, catalog, name)
        temporary = self._directory / f".{ref.hash.hex()}-{os.urandom(4).hex()}"
        with self._lock:
            self._writing.add(temporary.name)
        try:
            with disk_errors(self._directory):
                self._directory.mkdir(parents=True, exist_ok=True)
                try:
                    temporary.write_bytes(data)
                    crash_point("subscriber.before_fetched")
                    temporary.rename(self._path(ref))
                    crash_point("subscriber.after_fetched")
                finally:
                    temporary.unlink(missing_ok=True)
        finally:
            with self._lock:
                self._writing.remove(temporary.name)
        return len(data)

    def _path(self, ref: ChunkRef) -> Path:
        return self._directory / (ref.hash.hex() + _SUFFIX)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it was damaged, and removed by whoever found out
        return 0
