"""Account for optimizer steps: find what each changed, and prove it, or send the block whole (DESIGN §4)."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from publisher.changes import BLOCK, Bits16, Digests, Offsets
from publisher.find import Found, find, find_copied
from publisher.optimizers import StepRecord, fits
from publisher.shard import Shard, Source

_AHEAD = 8
"""Pieces that may wait to be absorbed: what bounds memory, whatever the size of the model."""

Steps = Iterable[tuple[Shard, StepRecord]]

Copies = Iterable[tuple[Shard, torch.Tensor]]
"""Shards, and what an optimizer has stepped in their place, of their shape."""

_Find = Callable[[int, int], Found]
"""Finds what changed between two flat indices of some shard."""


@dataclass
class CaptureStats:
    """Counts since the last publish. `ambiguous`: captured elements whose old value was not certain at first."""

    ambiguous: int = 0
    unproved_blocks: int = 0


def capture_steps(steps: Steps, stats: CaptureStats, threads: Executor) -> None:
    """Account for what an optimizer's last step did to the given shards. Call it in the step post-hook.

    Step accounting, per parameter: not advanced, nothing to do (the digest at publish proves it); advanced by one,
    invert; anything else (skipped ahead, rolled back), send the tensor whole.
    """
    _capture(_inversions(steps, stats), stats, threads)


def capture_copies(copies: Copies, stats: CaptureStats, threads: Executor) -> None:
    """The same for shards with a master, while their parameters still hold the bits before the step.

    No step count is asked: what is compared is there, and the proof tells whether it is what it should be.
    """
    _capture(((shard, partial(find_copied, shard, master)) for shard, master in copies), stats, threads)


def _inversions(steps: Steps, stats: CaptureStats) -> Iterator[tuple[Shard, _Find]]:
    for shard, record in steps:
        advanced = record.step - shard.step
        shard.step = record.step
        if shard.source is not Source.INVERSION or advanced == 0:
            continue
        state = (shard.tensor, record.m, record.v)
        known = all(fits(tensor, shard.tensor) for tensor in state) and record.hyper.invertible
        if advanced != 1 or not known:
            _give_up(shard, stats)
            continue
        yield shard, partial(find, shard, record)


def _capture(work: Iterable[tuple[Shard, _Find]], stats: CaptureStats, threads: Executor) -> None:
    running: deque[tuple[_Capture, Callable[[], Found]]] = deque()
    for shard, find_part in work:
        capture = _Capture(shard, stats)
        for start, stop in shard.cuts():
            running.append((capture, _submit(threads, shard, find_part, start, stop)))
            if len(running) > _AHEAD:
                _take(running)
    while running:
        _take(running)


def _take(running: "deque[tuple[_Capture, Callable[[], Found]]]") -> None:
    capture, found = running.popleft()
    capture.absorb(found())


def capture_snapshot(shard: Shard) -> None:
    """Compare the live bits, or those made now, with the kept copy, exactly; call it at publish."""
    snapshot = shard.snapshot
    assert snapshot is not None
    found = _Changed()
    for start, bits in shard.pieces(None if shard.made is None else shard.made()):
        stored = shard.part_of(snapshot, start, start + len(bits))
        kept = stored.to(bits.device)  # weights may have been offloaded, or brought back, since
        local = (bits != kept).nonzero().flatten()
        digests = shard.fingerprint.blocks(bits, start)
        old = kept[local].cpu().numpy().view(np.uint16)
        found.add(shard, start, digests, (local + start).cpu().numpy(), old)
        stored.copy_(bits)
    found.hand_over(shard)


def _submit(threads: Executor, shard: Shard, find_part: _Find, start: int, stop: int) -> Callable[[], Found]:
    """Start finding one piece, on a thread for CPU state; a GPU has its own parallelism."""
    if shard.tensor.device.type == "cpu":
        return threads.submit(find_part, start, stop).result
    return partial(find_part, start, stop)


@dataclass
class _Changed:
    """What one pass over a shard has found so far: it becomes the shard's all at once."""

    blocks: list[Offsets] = field(default_factory=list)
    digests: list[Digests] = field(default_factory=list)
    offsets: list[Offsets] = field(default_factory=list)
    old: list[Bits16] = field(default_factory=list)

    def add(self, shard: Shard, start: int, digests: Digests, offsets: Offsets, old: Bits16) -> None:
        first = start // BLOCK
        moved = shard.moved(first, digests)
        self.blocks.append(moved)
        self.digests.append(digests[moved - first])
        self.offsets.append(offsets)
        self.old.append(old)

    def hand_over(self, shard: Shard) -> None:
        if self.blocks:
            shard.move(np.concatenate(self.blocks), np.concatenate(self.digests))
            shard.changes.add(np.concatenate(self.offsets), np.concatenate(self.old))


@dataclass
class _Capture:
    """One shard's step while its pieces come in, in order; complete after the last one."""

    shard: Shard
    stats: CaptureStats
    changed: _Changed = field(default_factory=_Changed)
    unproved: list[Offsets] = field(default_factory=list)  # blocks

    def absorb(self, found: Found) -> None:
        shard = self.shard
        proved = found.prove(shard.fingerprint)
        keep = proved[found.block] & (found.old != found.new)
        self.changed.add(shard, found.start, found.digests, found.local[keep] + found.start, found.old[keep])
        self.unproved.append(np.flatnonzero(~proved) + found.start // BLOCK)
        self.stats.ambiguous += int(np.count_nonzero(keep & found.uncertain))
        if found.start // BLOCK + len(found.digests) == shard.first_block + len(shard.kept):
            self._complete()

    def _complete(self) -> None:
        whole = np.concatenate(self.unproved)
        before = self.shard.kept_of(whole)
        self.changed.hand_over(self.shard)
        self.shard.changes.add_whole(whole, before)
        self.stats.unproved_blocks += len(whole)


def _give_up(shard: Shard, stats: CaptureStats) -> None:
    stats.unproved_blocks += len(shard.kept)
    shard.send_whole()
    shard.kept = shard.digests()
