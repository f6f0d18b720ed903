"""The changes of one process's shards: captured with every step, taken by a publish, put back if it failed."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from chunkstore.codec import Section
from manifest.catalog import Catalog
from manifest.schema import Stats
from publisher.capture import CaptureStats, Copies, capture_copies, capture_steps
from publisher.errors import CaptureLost
from publisher.find import compile_ahead
from publisher.optimizers import StepRecord
from publisher.seal import Sealed, restore, sections, take, whole_sections
from publisher.shard import Shard, Source
from publisher.upload import Upload

log = logging.getLogger("deltasync.publisher")


@dataclass
class Taken:
    """What one publish took, kept until its outcome is known. `seconds`: of capture and seal."""

    sealed: list[Sealed] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    optimizer_steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Tracking:
    """Follows the shards from step to step. Not thread-safe.

    `still`: called after every read of the weights, before what was read is used; raises CaptureLost if somebody may
    have written them meanwhile.
    """

    def __init__(self, catalog: Catalog, shards: Sequence[Shard], still: Callable[[], None]) -> None:
        self.catalog = catalog
        self.shards = shards
        self._still = still
        self._stats = CaptureStats()
        self._seconds = 0.0
        self._steps = 0
        self._lost = False
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="deltasync-capture")

    def prepare(self) -> None:
        """Do now what the first step would otherwise wait for."""
        if any(shard.source in (Source.COPY, Source.INVERSION) for shard in self.shards):
            compile_ahead()

    def capture(
        self,
        records: Iterable[tuple[Shard, StepRecord]],
        copies: Copies = (),
        *,
        begins: bool = True,
    ) -> None:
        """Account for one optimizer step, before anything else touches the weights or the optimizer's state.

        `records`: what it did to shards found by inversion. `copies`: shards with the masters that it has stepped.
        `begins`: False if it is more of the step before, as where an optimizer steps its groups one by one.
        Raises CaptureLost if they were touched all the same; then track is lost.
        """
        begin = time.perf_counter()
        if self._lost:
            for shard, record in records:
                shard.step = record.step  # nothing to compare with: the digests decide at publish
        else:
            capture_steps(records, self._stats, self._threads)
            capture_copies(copies, self._stats, self._threads)
        try:
            self._still()
        except CaptureLost:
            self.lose_track()
            raise
        self._steps += int(begins)
        self._seconds += time.perf_counter() - begin

    def lose_track(self, steps: int = 0) -> None:
        """`steps` optimizer steps were not captured: the next version sends every block whole whose digest differs."""
        self._lost = True
        self._steps += steps
        for shard in self.shards:
            shard.forget()

    def send_whole(self, tensors: Iterable[int]) -> None:
        """The next version sends everything of these catalog tensors."""
        wanted = set(tensors)
        for shard in self.shards:
            if shard.id in wanted:
                shard.send_whole()

    def take(self, taken: Taken, upload: Upload, committed: Callable[[Shard], int | None]) -> None:
        """Move all changes into `taken` and `upload`, reading the weights once.

        `committed`: the digest of what a shard holds in the base, None without a base. However this is interrupted,
        what was moved can be put back.
        """
        for shard in self.shards:
            sealed = take(shard, committed(shard), self._stats)
            taken.sealed.append(sealed)
            _feed(upload, sections(sealed, self._stats))

    def take_whole(self, upload: Upload) -> None:
        """Copy the live weights, for an anchor."""
        for shard in self.shards:
            _feed(upload, whole_sections(shard))

    def finish(self, taken: Taken, begin: float) -> None:
        """Nothing more is read for `taken`, which was begun at `begin` (perf_counter). Raises CaptureLost."""
        self._still()
        taken.seconds = {"capture": self._seconds, "seal": time.perf_counter() - begin}
        taken.optimizer_steps = self._steps
        taken.stats = Stats(
            elements=sum(t.numel for t in self.catalog.tensors),
            ambiguous=self._stats.ambiguous,
            unproved_blocks=self._stats.unproved_blocks,
            sources=_sources(self.shards),
        )
        if self._stats.unproved_blocks:
            log.warning("%d unproved blocks are sent whole", self._stats.unproved_blocks)
        self._stats, self._seconds, self._steps, self._lost = CaptureStats(), 0.0, 0, False

    def put_back(self, taken: Taken) -> None:
        """The version was not committed: its changes precede those found since."""
        for sealed in taken.sealed:
            restore(sealed)
        self._steps += taken.optimizer_steps

    def close(self) -> None:
        self._threads.shutdown()


def _sources(shards: Sequence[Shard]) -> dict[str, int]:
    """Elements watched by each source."""
    counts: Counter[str] = Counter()
    for shard in shards:
        counts[shard.source] += shard.numel
    return dict(counts)


def _feed(upload: Upload, parts: Iterable[Section]) -> None:
    for section in parts:
        upload.add(section)
