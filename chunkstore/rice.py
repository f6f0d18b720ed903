"""Strictly increasing offsets as Rice-split gaps (docs/FORMAT.md, "absolute").

Gap i is offset i minus offset i−1 minus 1 (offset −1 is −1). Its low `r` bits go to `low`: ⌊r/8⌋ byte planes,
then the rest bit-packed. Its high part goes to `high` as one byte; 255 means 255 plus the next of `escapes`.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from chunkstore.bitpack import pack, packed_size, unpack
from chunkstore.section import WINDOW_BITS

U32 = npt.NDArray[np.uint32]

MAX_RICE: Final = WINDOW_BITS
ESCAPE: Final = 255
_SAMPLE: Final = 4096  # gaps looked at when choosing r


@dataclass(frozen=True, slots=True)
class RiceStreams:
    """The streams of one list of offsets; each is compressed on its own."""

    r: int
    low: bytes
    high: bytes
    escapes: bytes


def encode_offsets(offsets: U32) -> RiceStreams:
    """Split `offsets` (not empty, strictly increasing, below 2²²) by the r estimated to be the smallest."""
    gaps = np.diff(offsets, prepend=np.uint32(0))
    gaps[1:] -= np.uint32(1)
    r = choose_rice(gaps)
    tops = gaps >> np.uint32(r)
    high = np.minimum(tops, np.uint32(ESCAPE)).astype(np.uint8)
    escapes = tops[tops >= ESCAPE] - np.uint32(ESCAPE)
    return RiceStreams(r, _pack_low(gaps, r), high.tobytes(), escapes.astype("<u4").tobytes())


def decode_offsets(r: int, low: bytes, high: bytes, escapes: bytes, limit: int) -> U32 | None:
    """The offsets, uint32 and strictly increasing, or None if one of them is not below `limit` (≤ 2²²).

    `high` is not empty; `low` and `escapes` have the sizes that `low_size` and `escape_count` call for.
    """
    gaps = np.frombuffer(high, dtype=np.uint8).astype(np.uint32)
    if escapes:
        extra = np.frombuffer(escapes, dtype="<u4")
        if int(extra.max()) >= limit:
            return None
        gaps[gaps == ESCAPE] += extra
    if int(gaps.max()) > (limit - 1) >> r:  # before shifting, so that nothing wraps
        return None
    gaps <<= np.uint32(r)
    _add_low(gaps, low, r)
    gaps[1:] += np.uint32(1)
    if int(gaps.sum(dtype=np.uint64)) >= limit:
        return None
    return np.cumsum(gaps, dtype=np.uint32)


def low_size(count: int, r: int) -> int:
    """Bytes of `low` for `count` offsets."""
    return r // 8 * count + packed_size(count, r % 8)


def escape_count(high: bytes) -> int:
    """How many entries of `escapes` the high parts call for."""
    return high.count(ESCAPE)


def choose_rice(gaps: U32) -> int:
    """The r with the smallest estimated size: per gap r bits, the entropy of the high byte, and escapes."""
    sample = gaps[:: max(1, len(gaps) // _SAMPLE)]
    top = int(np.log2(max(1.0, float(sample.mean()))))
    best, smallest = 0, _estimate(sample, len(gaps), 0)
    for r in range(max(1, top - 4), top + 1):
        size = _estimate(sample, len(gaps), r)
        if size < smallest:
            best, smallest = r, size
    return best


def _estimate(sample: U32, count: int, r: int) -> float:
    """Estimated bits per gap. The constants were fitted to what zstd made of random masks: twelve bits for each symbol
    that occurs, and a third of a bit for each bit that the entropy is below 3.
    """
    high = np.minimum(sample >> np.uint32(r), np.uint32(ESCAPE))
    counts = np.bincount(high, minlength=ESCAPE + 1)
    share = counts[counts > 0] / len(sample)
    entropy = float(-(share * np.log2(share)).sum())
    escaped = float(counts[ESCAPE]) / len(sample)
    coded = entropy + max(0.0, 3.0 - entropy) / 3 + 12 * len(share) / count
    return r + min(8.0, coded) + 32 * escaped


def _pack_low(gaps: U32, r: int) -> bytes:
    octets = gaps.view(np.uint8).reshape(-1, 4)
    planes = b"".join(octets[:, j].tobytes() for j in range(r // 8))
    rest = r % 8
    if not rest:
        return planes
    return planes + pack(octets[:, r // 8] & np.uint8((1 << rest) - 1), rest)


def _add_low(gaps: U32, low: bytes, r: int) -> None:
    """Put the low bits back below the high parts, in place."""
    data, count = np.frombuffer(low, dtype=np.uint8), len(gaps)
    octets = gaps.view(np.uint8).reshape(-1, 4)
    for j in range(r // 8):
        octets[:, j] = data[j * count : (j + 1) * count]
    if r % 8:
        octets[:, r // 8] |= unpack(data[r // 8 * count :], count, r % 8)
