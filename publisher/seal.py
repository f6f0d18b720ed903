"""Freeze a shard's changes into sections, after checking them against the current bits (DESIGN §4, "At publish").

Runs while the trainer is held: it reads the live tensor once.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from chunkstore.codec import WINDOW, Section
from chunkstore.dtypes import Bits, bits_dtype
from chunkstore.torch_dtypes import BIT_DTYPES
from publisher.capture import CaptureStats, capture_snapshot
from publisher.changes import BLOCK, Bits16, ChangeSet, Flags, Offsets
from publisher.placing import placed
from publisher.proof import block_sums
from publisher.shard import PIECE, Shard, Source

_WHOLE_WINDOW = 1 / 3
"""Stored fraction of a window above which it is sent whole: it would be about as large, and simpler to apply."""

_OWN_PAGES: Final = 1 << 20
"""Bytes from which values get pages of their own, which return to the system with them: chunks end out of order on
other threads, and the holes that this leaves in a heap grow with the model."""


@dataclass
class Sealed:
    """One shard's part of a version.

    `changes`: what was taken from the shard, to be merged back if the commit fails. `base`, `digest`: of what it holds,
    in the base and in the version. `sections` is consumed once; `changes` and `digest` are complete after that.
    """

    shard: Shard
    changes: ChangeSet
    base: int
    digest: int = 0


def take(shard: Shard, committed: int | None, stats: CaptureStats) -> Sealed:
    """Begin sealing: bring the change set up to date. `committed`: the tensor's digest in the base, None if no base.

    A base that does not add up to the committed digest is not a base: the tensor is sent whole.
    """
    if shard.source is Source.SNAPSHOT:
        capture_snapshot(shard)
    if shard.base_digest != committed:
        known = len(shard.kept) - len(shard.changes.whole_blocks)
        stats.unproved_blocks += known if committed is not None else 0
        shard.send_whole()
    return Sealed(shard, shard.changes, shard.base_digest)


def sections(sealed: Sealed, stats: CaptureStats) -> Iterator[Section]:
    """Yield what to send, window by window; afterwards the shard's changes start anew from the bits read here."""
    shard = sealed.shard
    for start, bits in _windows(shard):
        for section in _window(sealed, start, bits, stats):
            yield from placed(shard, section)
    sealed.digest = shard.kept_digest
    shard.changes = ChangeSet.empty()


def whole_sections(shard: Shard) -> Iterator[Section]:
    """The live tensor, whole, for an anchor."""
    spec = shard.spec
    for start, bits in _windows(shard):
        section = Section(shard.id, spec.dtype, start, start + len(bits), None, _values(shard, bits))
        yield from placed(shard, section)


def restore(sealed: Sealed) -> None:
    """The version was not committed: what was taken precedes what the shard has found since."""
    sealed.shard.changes = sealed.changes.before(sealed.shard.changes)


def _windows(shard: Shard) -> Iterator[tuple[int, torch.Tensor]]:
    """(number of the first element, inference bits) of each window; the bits are overwritten by the next one's."""
    values = torch.empty(min(WINDOW, shard.numel), dtype=shard.wire, device=shard.tensor.device)
    for grid in range(shard.start - shard.start % WINDOW, shard.stop, WINDOW):
        start, stop = max(grid, shard.start), min(grid + WINDOW, shard.stop)
        window = values[: stop - start]
        for at in range(0, len(window), PIECE):
            piece = window[at : at + PIECE]
            piece.copy_(shard.part_of(shard.tensor, start + at, start + at + len(piece)))
        yield start, window.view(BIT_DTYPES[shard.spec.width])


def _window(sealed: Sealed, start: int, bits: torch.Tensor, stats: CaptureStats) -> Iterator[Section]:
    shard, changes = sealed.shard, sealed.changes
    stop, block = start + len(bits), start // BLOCK
    now = shard.fingerprint.blocks(bits, start)
    base = changes.base_digests(block, shard.kept_from(block, len(now)))
    edited = shard.moved(block, now)  # after the last hook: an EMA swap, a clamp, a reload, a buffer's update
    shard.move(edited, now[edited - block])
    first, last = np.searchsorted(changes.offsets, [start, stop])
    offsets, old = changes.offsets[first:last], changes.old[first:last]
    at = torch.from_numpy(offsets - start).to(bits.device)
    new = bits[at].cpu().numpy().view(np.uint16) if len(offsets) else np.empty(0, np.uint16)
    terms = shard.fingerprint.weights(offsets) * (new.astype(np.uint64) - old.astype(np.uint64))
    sums = base + block_sums(terms, offsets // BLOCK - block, len(now))
    whole = changes.is_whole(block, len(now))
    wrong = sums != now
    wrong[edited - block] = True
    wrong &= ~whole
    if shard.source in (Source.COPY, Source.INVERSION):
        stats.unproved_blocks += int(np.count_nonzero(wrong))
    if wrong.any():  # should the commit fail, these blocks stay whole
        changes.add_whole(block + np.flatnonzero(wrong), base[wrong])
    whole |= wrong
    keep = (new != old) & ~whole[offsets // BLOCK - block]
    yield from _cut(shard, start, stop, bits, whole, (offsets - start)[keep], new[keep], old[keep])


def _values(shard: Shard, bits: torch.Tensor) -> Bits:
    values: Bits = bits.cpu().numpy().view(bits_dtype(shard.spec.dtype))
    if values.nbytes < _OWN_PAGES:
        return values.copy()
    own: Bits = np.frombuffer(
        mmap.mmap(-1, values.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), values.dtype
    )
    own[:] = values
    return own


def _cut(
    shard: Shard,
    start: int,
    stop: int,
    bits: torch.Tensor,
    whole: Flags,
    offsets: Offsets,
    new: Bits16,
    old: Bits16,
) -> Iterator[Section]:
    spec = shard.spec
    stored = int(np.count_nonzero(whole)) * BLOCK + len(offsets)
    if stored > (stop - start) * _WHOLE_WINDOW:
        whole = np.ones_like(whole)
        offsets = offsets[:0]
    for low, high, is_whole in _runs(whole, start, stop):
        if is_whole:
            yield Section(
                shard.id, spec.dtype, low, high, None, _values(shard, bits[low - start : high - start])
            )
            continue
        first, last = np.searchsorted(offsets, [low - start, high - start])
        if first < last:
            inside = (offsets[first:last] - (low - start)).astype(np.uint32)
            part = slice(first, last)
            yield Section(shard.id, spec.dtype, low, high, inside, new[part], old=old[part])


def _runs(whole: Flags, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """The range as runs of blocks that are all whole or all not: (first, end, whole). Sections never overlap."""
    grid = start - start % BLOCK
    edges = [0, *(np.flatnonzero(np.diff(whole)) + 1).tolist(), len(whole)]
    for low, high in pairwise(edges):
        yield max(grid + low * BLOCK, start), min(grid + high * BLOCK, stop), bool(whole[low])
