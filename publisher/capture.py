"""Find what one optimizer step changed, and prove that nothing was missed (DESIGN §4).

For each block: reconstruct the old bits, and accept them only if their digest is the one kept from before the step.
A block that cannot be proved is marked to be sent whole.
"""

from dataclasses import dataclass

import numpy as np
import torch

from chunkstore.digest_torch import block_digests
from publisher.changes import BLOCK, Bits16, Digests, Flags, Offsets
from publisher.inversion import bits16, reconstruct
from publisher.optimizers import StepRecord
from publisher.proof import Terms, block_sums, find_flips
from publisher.shard import PIECE, Shard, Source


@dataclass
class CaptureStats:
    """Counts since the last publish. `ambiguous`: captured elements whose old value was not certain at first."""

    ambiguous: int = 0
    unproved_blocks: int = 0


def capture_step(shard: Shard, record: StepRecord, stats: CaptureStats) -> None:
    """Account for what the optimizer's last step did to `shard`. Call it in the step post-hook.

    Step accounting, per parameter: not advanced, nothing to do (the digest at publish proves it); advanced by one,
    invert; anything else (skipped ahead, rolled back), send the tensor whole.
    """
    advanced = record.step - shard.step
    shard.step = record.step
    if shard.source is not Source.INVERSION or advanced == 0:
        return
    moments = record.m is not None and record.v is not None
    if advanced != 1 or not moments or not record.hyper.invertible:
        _give_up(shard, stats)
        return
    _invert(shard, record, stats)


def capture_snapshot(shard: Shard) -> None:
    """Compare the live bits with the kept copy, exactly; call it at publish."""
    snapshot = shard.snapshot
    assert snapshot is not None
    offsets, old = [], []
    for start, bits in shard.pieces():
        kept = snapshot[start : start + len(bits)]
        local = (bits != kept).nonzero().flatten()
        offsets.append((local + start).cpu().numpy())
        old.append(kept[local].cpu().numpy().view(np.uint16))
        kept.copy_(bits)
    if offsets:
        shard.changes.add(np.concatenate(offsets), np.concatenate(old))
    shard.kept = shard.digests()


def _give_up(shard: Shard, stats: CaptureStats) -> None:
    stats.unproved_blocks += len(shard.kept)
    shard.changes.add_whole(np.arange(len(shard.kept)))
    shard.kept = shard.digests()


def _invert(shard: Shard, record: StepRecord, stats: CaptureStats) -> None:
    assert record.m is not None
    assert record.v is not None
    theta, m, v = shard.flat(), record.m.reshape(-1), record.v.reshape(-1)
    offsets, old, unproved = [], [], []
    for start in range(0, shard.spec.numel, PIECE):
        part = slice(start, min(start + PIECE, shard.spec.numel))
        blocks = slice(start // BLOCK, -(-part.stop // BLOCK))
        new = bits16(theta[part], shard.wire)
        digests = block_digests(shard.coefficients, new, start, BLOCK).cpu().numpy().view(np.uint64)
        moved = (digests != shard.kept[blocks]) & ~shard.changes.whole[blocks]
        if moved.any():
            known = reconstruct(theta[part], m[part], v[part], record.step, record.hyper, shard.wire)
            flagged = ((known.low != new) | (known.high != new)).nonzero().flatten()
            found = _Piece(
                start,
                flagged.cpu().numpy(),
                *(_at(x, flagged) for x in (new, known.guess, known.low, known.high)),
            )
            proved = found.prove(shard, digests, shard.kept[blocks], moved)
            unproved.append(np.flatnonzero(moved & ~proved) + blocks.start)
            keep = proved[found.block] & (found.old != found.new)
            offsets.append(found.local[keep] + start)
            old.append(found.old[keep])
            stats.ambiguous += int(np.count_nonzero(keep & found.uncertain))
        shard.kept[blocks] = digests
    if offsets:
        shard.changes.add(np.concatenate(offsets), np.concatenate(old))
        whole = np.concatenate(unproved)
        shard.changes.add_whole(whole)
        stats.unproved_blocks += len(whole)


def _at(bits: torch.Tensor, where: torch.Tensor) -> Bits16:
    return bits[where].cpu().numpy().view(np.uint16)


@dataclass
class _Piece:
    """The flagged elements of one piece: `local` ascending offsets in it, and their bits.

    `old` starts as the reconstruction's guess and is corrected by `prove`.
    """

    start: int
    local: Offsets
    new: Bits16
    old: Bits16
    low: Bits16
    high: Bits16

    @property
    def block(self) -> Offsets:
        return self.local // BLOCK

    @property
    def uncertain(self) -> Flags:
        flags: Flags = self.low != self.high
        return flags

    def prove(self, shard: Shard, now: Digests, kept: Digests, moved: Flags):  # type: ignore[no-untyped-def]
        """Which blocks are bit-exact, `old` included: their reconstruction has the kept digest."""
        weights = element_weights(shard, self.local + self.start)
        back = now - block_sums(weights * _difference(self.new, self.old), self.block, len(now))
        missing = kept - back
        proved: Flags = moved & (missing == 0)
        for block in np.flatnonzero(moved & ~proved):
            doubtful, other = self._alternatives(np.flatnonzero((self.block == block) & self.uncertain))
            flips = find_flips(missing[block], weights[doubtful] * _difference(other, self.old[doubtful]))
            if flips is not None:
                self.old[doubtful[list(flips)]] = other[list(flips)]
                proved[block] = True
        return proved

    def _alternatives(self, uncertain: Offsets) -> tuple[Offsets, Bits16]:
        """Other old bits that the `uncertain` elements may have had: (position in this piece, bits) pairs.

        The neighbours of the guess, as far as they lie within the bounds; and where the bounds straddle zero, both
        zeros: weights often start there, and nothing near zero survives in θ_t to tell.
        """
        guess, low, high = (_sortable(bits[uncertain]) for bits in (self.old, self.low, self.high))
        below, above = (guess > low) & (guess > 0), (guess < high) & (guess < 0xFFFF)
        at_zero = (low < 0x8000) & (high >= 0x8000)
        negative, positive = np.full_like(guess, 0x7FFF), np.full_like(guess, 0x8000)
        where = np.concatenate([uncertain[below], uncertain[above], uncertain[at_zero], uncertain[at_zero]])
        other = np.concatenate([guess[below] - 1, guess[above] + 1, negative[at_zero], positive[at_zero]])
        differs = other != _sortable(self.old[where])
        return where[differs], _sortable_inverse(other[differs])


def element_weights(shard: Shard, offsets: Offsets) -> Terms:
    """A·C of each element of a 16-bit tensor (docs/FORMAT.md, "Digest"); uint64."""
    coefficients = shard.coefficients
    lanes = offsets.astype(np.uint64)
    weights: Terms = coefficients.a(lanes >> np.uint64(12)) * coefficients.c[offsets & 4095]
    return weights


def _difference(a: Bits16, b: Bits16) -> Terms:
    return a.astype(np.uint64) - b.astype(np.uint64)


def _sortable(bits: Bits16) -> Bits16:
    """16-bit floats as integers that sort as the numbers do: −0 directly below +0."""
    return np.where(bits >= 0x8000, np.uint16(0xFFFF) - bits, bits + np.uint16(0x8000))


def _sortable_inverse(order: Bits16) -> Bits16:
    return np.where(order < 0x8000, np.uint16(0xFFFF) - order, order - np.uint16(0x8000))
