"""What one piece of a parameter looks like after a step, and the proof that nothing in it was missed (DESIGN §4)."""

import math
import threading
from dataclasses import dataclass

import numpy as np
import torch

from chunkstore.difference import order, unorder
from manifest.catalog import TensorSpec
from publisher import kernel
from publisher.changes import BLOCK, Bits16, Digests, Flags, Offsets
from publisher.fingerprint import Fingerprint
from publisher.inversion import Hyper, bits16, reconstruct
from publisher.optimizers import StepRecord
from publisher.proof import Terms, block_sums, find_flips
from publisher.shard import PIECE, Shard, Source

_ROWS = BLOCK >> 12


class _Scratch(threading.local):
    """A thread's room for what the kernels find, kept from piece to piece: fresh pages cost a tenth of the time."""

    def __init__(self) -> None:
        self._local, self._bits = np.empty(PIECE + 1, np.int64), np.empty((4, PIECE + 1), np.uint16)

    def room(self, count: int) -> tuple[Offsets, Bits16]:
        """For `count` elements: int64 offsets, and uint16 bits of shape [4, at least `count`]."""
        if count > len(self._local):
            return np.empty(count, np.int64), np.empty((4, count), np.uint16)
        return self._local, self._bits


_SCRATCH = _Scratch()


@dataclass
class Found:
    """The elements of one piece whose old bits are not certainly the new ones, and its blocks' digests.

    Elements only of blocks that have changed and are not yet sent whole.

    `digests`: of the new bits. `missing`: kept digest minus the reconstruction's, 0 where it is proved as it stands.
    `local`: ascending offsets from `start`; `new`, `old`, `low`, `high`: their bits, `old` the reconstruction's guess
    until `prove` corrects it.
    """

    start: int
    digests: Digests
    missing: Digests
    local: Offsets
    new: Bits16
    old: Bits16
    low: Bits16
    high: Bits16

    @property
    def block(self) -> Offsets:
        """The block, counted within the piece, of each element."""
        return self.local // BLOCK

    @property
    def uncertain(self) -> Flags:
        """Where the bounds leave more than one old value."""
        flags: Flags = self.low != self.high
        return flags

    def prove(self, fingerprint: Fingerprint) -> Flags:
        """Which blocks are bit-exact, `old` included: their reconstruction has the kept digest."""
        proved: Flags = self.missing == 0
        for block in np.flatnonzero(~proved):
            uncertain = np.flatnonzero((self.block == block) & self.uncertain)
            weights = fingerprint.weights(self.local[uncertain] + self.start)
            proved[block] = self._settle(uncertain, weights, self.missing[block])
        return proved

    def _settle(self, uncertain: Offsets, weights: Terms, missing: np.uint64) -> bool:
        """Choose the `uncertain` old bits so that the digest grows by `missing`: true if that can be done.

        Begins with the guess, and then with zero wherever that is possible: a pruned or dequantized tensor has any
        number of zeros, and a kernel that rounds u differently from ours makes all of them look like something else.
        """
        guess = self.old[uncertain]
        at_zero = self._straddles_zero(uncertain)
        where, other = self._alternatives(uncertain, at_zero)
        for start in (guess, np.where(at_zero, np.uint16(0), guess)):
            old, differs = start.copy(), other != start[where]
            at, bits = where[differs], other[differs]
            left = np.uint64((int(missing) - _growth(weights, start, guess)) % (1 << 64))
            flips = find_flips(left, weights[at] * _difference(bits, start[at]))
            if flips is None:
                continue
            old[at[list(flips)]] = bits[list(flips)]
            if _growth(weights, old, guess) == missing:  # two flips of one element are none
                self.old[uncertain] = old
                return True
        return False

    def _straddles_zero(self, uncertain: Offsets) -> Flags:
        """Where zero lies within the bounds: nothing of such a value survives in θ_t to tell."""
        low, high = order(self.low[uncertain]), order(self.high[uncertain])
        straddles: Flags = (low < 0x8000) & (high >= 0x8000)
        return straddles

    def _alternatives(self, uncertain: Offsets, at_zero: Flags) -> tuple[Offsets, Bits16]:
        """What the `uncertain` elements may have been: (index into `uncertain`, bits) pairs.

        The neighbours of the guess, as far as they lie within the bounds; and where the bounds straddle zero, both
        zeros and the guess itself, which is then not the only start.
        """
        guess, low, high = (order(bits[uncertain]) for bits in (self.old, self.low, self.high))
        below, above = (guess > low) & (guess > 0), (guess < high) & (guess < 0xFFFF)
        negative, positive = np.full_like(guess, 0x7FFF), np.full_like(guess, 0x8000)
        index = np.arange(len(uncertain))
        where = np.concatenate([index[below], index[above], *[index[at_zero]] * 3])
        other = [guess[below] - 1, guess[above] + 1, negative[at_zero], positive[at_zero], guess[at_zero]]
        return where, unorder(np.concatenate(other))


def find(shard: Shard, record: StepRecord, start: int, stop: int) -> Found:
    """Invert `record`'s step on elements `start` … `stop` of `shard`, one of its cuts.

    Compiled where the state is fp32 on the CPU and the wire is bf16, else with torch on the state's device; so is a
    first block that is short, for it does not begin where a row of the digest does.
    """
    found = None
    if shard.wire is torch.bfloat16 and shard.tensor.device.type == "cpu" and start % BLOCK == 0:
        found = find_compiled(shard, record, start, stop)
    return found if found is not None else find_reference(shard, record, start, stop)


def find_copied(shard: Shard, master: torch.Tensor, start: int, stop: int) -> Found:
    """Compare elements `start` … `stop` of a 16-bit parameter with its master; one cut, on the parameter's device.

    The step has written the master, and the parameter is still what it was: both old and new bits are at hand. They are
    proved all the same, for somebody may have written both between two steps.
    """
    parameter = shard.part_of(shard.tensor, start, stop)
    master = shard.part_of(master, start, stop).to(parameter.device, parameter.dtype)
    compiled = parameter.device.type == "cpu" and start % BLOCK == 0
    compare = compare_compiled if compiled else compare_reference
    return compare(shard, shard.bits(master), shard.bits(parameter), start)


def compare_reference(shard: Shard, new: torch.Tensor, old: torch.Tensor, start: int) -> Found:
    """What differs between int16 bits from element `start` on. In plain torch, on any device."""
    digests = shard.fingerprint.blocks(new, start)
    kept, skip = _history(shard, start, start + len(new))
    moved = (digests != kept) & ~skip
    local = (new != old).nonzero().flatten()
    local = local[torch.from_numpy(moved).to(local.device)[local // BLOCK]]
    now, base = (bits[local].cpu().numpy().view(np.uint16) for bits in (new, old))
    found = Found(start, digests, np.zeros_like(digests), local.cpu().numpy(), now, base, low=base, high=base)
    found.missing[moved] = (kept - _before(found, shard.fingerprint))[moved]
    return found


def compare_compiled(shard: Shard, new: torch.Tensor, old: torch.Tensor, start: int) -> Found:
    """The same by the compiled kernel."""
    kept, skip = _history(shard, start, start + len(new))
    now, base = (bits.numpy().view(np.uint16) for bits in (new, old))
    digests, missing, (local, _) = np.empty_like(kept), np.empty_like(kept), _SCRATCH.room(len(now))
    coefficients, weights = shard.fingerprint.coefficients, shard.fingerprint.run(start, start + len(now))
    rows = coefficients.a_run(start >> 12, len(kept) * _ROWS)
    count = kernel.compare(now, base, kept, skip, rows, coefficients.c, weights, digests, missing, local)
    local = local[:count].copy()
    now, base = now[local], base[local]
    return Found(start, digests, missing, local, now, base, low=base, high=base)


def find_reference(shard: Shard, record: StepRecord, start: int, stop: int) -> Found:
    """In plain torch, on any device: the oracle of the compiled kernel."""
    assert record.m is not None
    assert record.v is not None
    theta = shard.part_of(shard.tensor, start, stop)
    new = bits16(theta, shard.wire)
    digests = shard.fingerprint.blocks(new, start)
    kept, skip = _history(shard, start, stop)
    moved = (digests != kept) & ~skip
    missing, empty = np.zeros_like(digests), np.empty(0, np.uint16)
    if not moved.any():
        return Found(start, digests, missing, np.empty(0, np.int64), empty, empty, empty, empty)
    m, v = shard.part_of(record.m, start, stop), shard.part_of(record.v, start, stop)
    known = reconstruct(theta, m, v, record.step, record.hyper, shard.wire)
    flagged = ((known.low != new) | (known.high != new)).nonzero().flatten()
    flagged = flagged[torch.from_numpy(moved).to(flagged.device)[flagged // BLOCK]]
    bits = (x[flagged].cpu().numpy().view(np.uint16) for x in (new, known.guess, known.low, known.high))
    found = Found(start, digests, missing, flagged.cpu().numpy(), *bits)
    missing[moved] = (kept - _before(found, shard.fingerprint))[moved]
    return found


def find_compiled(shard: Shard, record: StepRecord, start: int, stop: int) -> Found | None:
    """The same by the compiled kernel; None where a value is not finite, which it leaves to the reference."""
    assert record.m is not None
    assert record.v is not None
    theta, m, v = (shard.part_of(x, start, stop).numpy() for x in (shard.tensor, record.m, record.v))
    kept, skip = _history(shard, start, stop)
    hyper, coefficients = record.hyper, shard.fingerprint.coefficients
    digests, missing = np.empty_like(kept), np.empty_like(kept)
    local, bits = _SCRATCH.room(stop - start + 1)  # the last candidate is written before it is judged
    count = kernel.scan(
        theta, m, v, kept, skip,
        coefficients.a_run(start >> 12, len(kept) * _ROWS), coefficients.c, shard.fingerprint.run(start, stop),
        np.float32(hyper.lr / (1.0 - hyper.beta1**record.step)),
        np.float32(math.sqrt(1.0 - hyper.beta2**record.step)),
        np.float32(hyper.eps), hyper.decay,
        digests, missing, local, bits,
    )  # fmt: skip
    if count < 0:
        return None
    new, old, low, high = bits[:, :count].copy()
    return Found(start, digests, missing, local[:count].copy(), new, old, low, high)


def compile_ahead() -> None:
    """Compile the kernels now, or load them from their cache: seconds that would otherwise be the first step's."""
    spec, one, zero = TensorSpec("compile_ahead", "BF16", (1,)), torch.ones(1), torch.zeros(1)
    record = StepRecord(1, Hyper(lr=0.0, beta1=0.9, beta2=0.9, eps=1.0, weight_decay=0.0), zero, zero)
    shard = Shard(0, spec, one, Source.INVERSION)
    find_compiled(shard, record, 0, 1)
    compare_compiled(shard, shard.bits(one), shard.bits(one), 0)


def _before(found: Found, fingerprint: Fingerprint) -> Digests:
    """Digests of the blocks with the old bits in place of the new ones."""
    terms = fingerprint.weights(found.local + found.start) * _difference(found.new, found.old)
    return found.digests - block_sums(terms, found.block, len(found.digests))


def _growth(weights: Terms, bits: Bits16, instead_of: Bits16) -> int:
    """What a digest grows by with `bits` in place of others."""
    return int((weights * _difference(bits, instead_of)).sum(dtype=np.uint64))


def _history(shard: Shard, start: int, stop: int) -> tuple[Digests, Flags]:
    kept = shard.kept_from(start // BLOCK, -(-stop // BLOCK) - start // BLOCK)
    return kept, shard.changes.is_whole(start // BLOCK, len(kept))


def _difference(a: Bits16, b: Bits16) -> Terms:
    return a.astype(np.uint64) - b.astype(np.uint64)
