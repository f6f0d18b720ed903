"""Encode sections and upload them as chunks, on threads, in bounded memory."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import blake3

from chunkstore.codec import MAX_SECTIONS, Section, encode_section, pack_chunk
from chunkstore.crashpoints import crash_point
from chunkstore.store import Store
from manifest.schema import ChunkRef
from manifest.sections import SectionRef, Sections

_CHUNK_TARGET = 16 << 20
"""Bytes of raw sections that make a chunk full: with one more window, objects stay below 64 MiB."""


@dataclass
class Uploaded:
    """The chunks of one version, in order, and what they cost."""

    chunks: list[ChunkRef] = field(default_factory=list)
    changed: int = 0  # elements stored
    bytes_by_encoding: Counter[str] = field(default_factory=Counter)
    encode_seconds: float = 0.0  # summed over threads
    upload_seconds: float = 0.0


class Upload:
    """One attempt at the chunks of one version. `add` from one thread, then `finish` from any.

    `key`: where chunk number n goes; asked on an uploading thread, where it may wait.
    `budget`: bytes of raw sections that may wait; `add` blocks above it, so memory stays bounded however slow the
    store is.
    """

    def __init__(
        self, store: Store, key: Callable[[int], str], pool: ThreadPoolExecutor, budget: int
    ) -> None:
        self._store = store
        self._key = key
        self._pool = pool
        self._free = budget
        self._running = 0
        self._room = threading.Condition()
        self._group: list[Section] = []
        self._group_bytes = 0
        self._jobs: list[Future[tuple[ChunkRef, Uploaded]]] = []

    @property
    def empty(self) -> bool:
        return not self._jobs and not self._group

    def add(self, section: Section) -> None:
        """Take one section. Raises what an earlier chunk's upload raised."""
        size = _raw_bytes(section)
        with self._room:
            # A section larger than the whole budget waits for it to be unused, rather than for ever.
            self._room.wait_for(lambda: self._free >= size or not self._running)
            self._free -= size
        for job in self._jobs:
            if job.done():
                job.result()
        self._group.append(section)
        self._group_bytes += size
        if self._group_bytes >= _CHUNK_TARGET or len(self._group) == MAX_SECTIONS:
            self._flush()

    def finish(self) -> Uploaded:
        """Wait until every chunk is durable. Raises the first upload's error."""
        self._flush()
        total = Uploaded()
        for job in self._jobs:
            chunk, cost = job.result()
            total.chunks.append(chunk)
            total.changed += cost.changed
            total.bytes_by_encoding.update(cost.bytes_by_encoding)
            total.encode_seconds += cost.encode_seconds
            total.upload_seconds += cost.upload_seconds
        crash_point("publisher.after_chunks")
        return total

    def _flush(self) -> None:
        if self._group:
            group, size = self._group, self._group_bytes
            self._group, self._group_bytes = [], 0
            with self._room:
                self._running += 1
            self._jobs.append(self._pool.submit(self._upload, len(self._jobs), group, size))

    def _upload(self, number: int, group: list[Section], size: int) -> tuple[ChunkRef, Uploaded]:
        try:
            cost = Uploaded()
            begin = time.perf_counter()
            encoded = [encode_section(section) for section in group]
            data = pack_chunk(encoded)
            for piece in encoded:
                cost.bytes_by_encoding[piece.encoding] += piece.nbytes
            cost.encode_seconds = time.perf_counter() - begin
            key = self._key(number)
            ref = ChunkRef(
                key=key,
                nbytes=len(data),
                hash=blake3.blake3(data).digest(),
                sections=Sections.of([_section_ref(section) for section in group]),
            )
            cost.changed = sum(len(section.values) for section in group)
            crash_point("publisher.before_chunk")
            begin = time.perf_counter()
            self._store.put(key, data)
            crash_point("publisher.after_chunk")
            cost.upload_seconds = time.perf_counter() - begin
            return ref, cost
        finally:
            group.clear()
            with self._room:
                self._free += size
                self._running -= 1
                self._room.notify_all()


def _raw_bytes(section: Section) -> int:
    return sum(part.nbytes for part in (section.values, section.offsets, section.old) if part is not None)


def _section_ref(section: Section) -> SectionRef:
    return SectionRef(
        tensor=section.tensor,
        start=section.start,
        stop=section.stop,
        whole=section.whole,
        changed=len(section.values),
    )
