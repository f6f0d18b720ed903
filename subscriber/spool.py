"""Fetched chunks on local disk: a fetch that was interrupted, or came early, is not repeated."""

import mmap
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from chunkstore.codec import ChunkReader
from chunkstore.errors import CorruptObject, LimitExceeded
from chunkstore.store import Store
from manifest.catalog import Catalog
from manifest.fetch import open_chunk
from manifest.schema import ChunkRef
from subscriber.disk import disk_errors
from subscriber.errors import StagedLost

_SUFFIX: Final = ".chunk"


class Spool:
    """Chunks by their hash in `directory`. Every method may be called from any thread."""

    def __init__(self, store: Store, directory: Path) -> None:
        self._store = store
        self._directory = directory

    def has(self, ref: ChunkRef) -> bool:
        """Whether the chunk was fetched; it is checked again when it is opened."""
        try:
            return self._path(ref).stat().st_size == ref.nbytes
        except OSError:  # whatever is wrong is met, and named, when it is written
            return False

    def fetch(self, ref: ChunkRef, catalog: Catalog) -> int:
        """Bring the chunk here unless it is, checked as `manifest.fetch` does. Returns the bytes fetched.

        Holds one chunk in memory. Raises what the store does, CorruptObject naming the key, StagingFull,
        StagingUnavailable.
        """
        if self.has(ref):
            return 0
        name = f"{self._store.url}/{ref.key}"
        try:
            data = self._store.get(ref.key, limit=ref.nbytes)
        except LimitExceeded as error:
            raise CorruptObject(
                f"{name} is larger than the {ref.nbytes} bytes its manifest promises", hint=error.hint
            ) from error
        open_chunk(data, ref, catalog, name)
        temporary = self._directory / f".{ref.hash.hex()}-{os.urandom(4).hex()}"
        with disk_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(data)
                temporary.rename(self._path(ref))
            finally:
                temporary.unlink(missing_ok=True)
        return len(data)

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

    def keep(self, hashes: Collection[bytes]) -> None:
        """Remove all chunks but these. Raises StagingUnavailable."""
        names = {value.hex() + _SUFFIX for value in hashes}
        with disk_errors(self._directory):
            for path in self._directory.glob("*"):
                if path.name not in names:
                    path.unlink(missing_ok=True)

    def missing_bytes(self, refs: Iterable[ChunkRef]) -> int:
        """Bytes that fetching `refs` will add here."""
        return sum(ref.nbytes for ref in refs if not self.has(ref))

    def _path(self, ref: ChunkRef) -> Path:
        return self._directory / (ref.hash.hex() + _SUFFIX)
