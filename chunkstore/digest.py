"""The digest of a tensor's bits, in numpy (docs/FORMAT.md, "Digest").

D(T) = Σ A[k >> 12] · C[k & 4095] · lane_k (mod 2⁶⁴) over the tensor's 16-bit lanes as unsigned integers.
One- and two-byte elements are one lane each; four- and eight-byte elements are 2 and 4 little-endian lanes.
The digest is additive over disjoint regions. It detects errors; it does not resist an adversary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from chunkstore.dtypes import Bits

U64 = npt.NDArray[np.uint64]

ROW_BITS: Final = 12
ROW: Final = 1 << ROW_BITS  # lanes that share one A
_MASK: Final = (1 << 64) - 1
_PIECE_ROWS: Final = 64  # rows per temporary: 2 MiB of uint64, about what a core's cache holds
_PIECE: Final = 1 << 16  # scattered lanes per temporary
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


def splitmix64(seed: int, k: U64) -> U64:
    """Outputs number `k` (counted from 0) of splitmix64 with seed `seed`; uint64, shape of `k`."""
    z = np.uint64(seed) + (k + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The coefficients A and C of one tensor name. `Coefficients.of` makes them and keeps recent ones."""

    name: str
    seed_a: int
    c: U64  # 4096 odd values, read-only

    @staticmethod
    @lru_cache(maxsize=64)
    def of(name: str) -> "Coefficients":
        data = name.encode()
        c = splitmix64(xxhash.xxh3_64_intdigest(b"C" + data), np.arange(ROW, dtype=np.uint64)) | np.uint64(1)
        c.flags.writeable = False
        return Coefficients(name, xxhash.xxh3_64_intdigest(b"A" + data), c)

    def a(self, rows: U64) -> U64:
        """A of the given row numbers; uint64, shape of `rows`."""
        return splitmix64(self.seed_a, rows) | np.uint64(1)

    def a_run(self, row: int, count: int) -> U64:
        """A of `count` consecutive rows from `row`."""
        return self.a(np.arange(row, row + count, dtype=np.uint64))


def lanes_per_element(width: int) -> int:
    """16-bit lanes of an element of `width` bytes (1, 2, 4 or 8)."""
    return max(1, width // 2)


def row_pieces(lane: int, count: int, max_rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a run of `count` lanes starting at `lane` where rows begin.

    Yields (row, column, rows, width): either part of one row, or up to `max_rows` whole ones.
    """
    end = lane + count
    while lane < end:
        row, column = lane >> ROW_BITS, lane & (ROW - 1)
        whole = 0 if column else min((end - lane) >> ROW_BITS, max_rows)
        rows, width = (whole, ROW) if whole else (1, min(ROW - column, end - lane))
        yield row, column, rows, width
        lane += rows * width


def digest(name: str, bits: Bits, start: int = 0) -> int:
    """Partial digest of a contiguous run of elements of tensor `name`, from flat element index `start`.

    `bits`: the elements' bit patterns, any unsigned dtype of 1, 2, 4 or 8 bytes, any shape (read row-major).
    Returns an int in [0, 2⁶⁴); 0 for an empty run.
    """
    coefficients = Coefficients.of(name)
    lanes = _lanes(bits)
    total = done = 0
    first = start * lanes_per_element(bits.itemsize)
    for row, column, rows, width in row_pieces(first, len(lanes), _PIECE_ROWS):
        block = lanes[done : done + rows * width].reshape(rows, width).astype(np.uint64)
        sums = np.einsum("ij,j->i", block, coefficients.c[column : column + width])
        total += int((sums * coefficients.a_run(row, rows)).sum())
        done += rows * width
    return total & _MASK


def digest_at(name: str, indices: npt.NDArray[np.int64], bits: Bits) -> int:
    """Partial digest of scattered elements: `bits[i]` is the pattern of flat element index `indices[i]`.

    `indices`: int64, one-dimensional, no index twice; `bits`: as long. Returns an int in [0, 2⁶⁴).
    """
    if len(indices) != len(bits):
        raise ValueError(f"{len(indices)} indices but {len(bits)} elements")
    coefficients = Coefficients.of(name)
    per = lanes_per_element(bits.itemsize)
    total = 0
    for i in range(0, len(indices), _PIECE):
        where = indices[i : i + _PIECE].astype(np.uint64) * np.uint64(per)
        at: U64 = np.add.outer(where, np.arange(per, dtype=np.uint64)).ravel()
        product = _a_at(coefficients, at >> np.uint64(ROW_BITS)) * coefficients.c[at & np.uint64(ROW - 1)]
        total += int((product * _lanes(bits[i : i + _PIECE])).sum())
    return total & _MASK


def _a_at(coefficients: Coefficients, rows: U64) -> U64:
    """A of each entry of `rows` (not empty), through a table where they lie close together."""
    low, high = int(rows.min()), int(rows.max())
    if high - low >= len(rows):
        return coefficients.a(rows)
    table = coefficients.a_run(low, high - low + 1)
    return np.asarray(table[rows - np.uint64(low)], dtype=np.uint64)


def _lanes(bits: Bits) -> npt.NDArray[np.unsignedinteger[Any]]:
    flat = np.ascontiguousarray(bits).ravel()
    return flat if flat.itemsize == 1 else flat.view("<u2")
