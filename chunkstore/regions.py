"""Strided regions: sets of elements of a flat memory, such as what a slice or a transpose of a tensor touches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final, Self

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

PIECE: Final = 1 << 16
"""Most runs that one step of an iteration names: 512 KiB per array."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements `start` + k⃗·`stride` for every k⃗ below `size`.

    Normal form, so that equal sets of the shapes that tensors have are equal objects: sizes above 1, strides
    descending, neighbours merged where they are one. Make it with `Region.of`.
    """

    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, start: int, size: Iterable[int], stride: Iterable[int]) -> Self:
        """The region of any strided view with at least one element; a zero stride is kept, and not `nested`."""
        merged: list[tuple[int, int]] = []
        for n, s in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n > 1), key=lambda d: -d[1]):
            if merged and merged[-1][1] == n * s:
                merged[-1] = (merged[-1][0] * n, s)
            else:
                merged.append((n, s))
        return cls(start, tuple(n for n, _ in merged), tuple(s for _, s in merged))

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def last(self) -> int:
        """The largest index in the region."""
        return self.start + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    @property
    def nested(self) -> bool:
        """True if each stride exceeds the extent of all smaller ones: no element occurs twice, and the order of k⃗ is
        that of the indices. Views of a row-major tensor are nested; sliding windows are not.
        """
        return nested(self.size, self.stride)


def nested(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether dimensions in descending order of `stride` (sizes above 1) are nested, see `Region.nested`."""
    extent = 0
    for n, s in zip(reversed(size), reversed(stride), strict=True):
        if s <= extent:
            return False
        extent += (n - 1) * s
    return True


def count_below(index: int, start: int, size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements of a nested region are smaller than `index`."""
    rest, count, inner = index - start, 0, prod(size)
    for n, s in zip(size, stride, strict=True):
        if rest <= 0:
            return count
        inner //= n
        whole = min(rest // s, n - 1)
        count += whole * inner
        rest -= whole * s
    return count + (rest > 0)


def runs(region: Region, start: int, stop: int) -> Iterator[tuple[Indices, int]]:
    """The elements of a nested region in `start` … `stop` as runs of consecutive ones, ascending.

    Yields (first indices, length of each of these runs); few distinct lengths occur, and at most PIECE runs a time.
    """
    yield from runs_at(
        region,
        count_below(start, region.start, region.size, region.stride),
        count_below(stop, region.start, region.size, region.stride),
    )


def runs_at(region: Region, first: int, last: int) -> Iterator[tuple[Indices, int]]:
    """The same of those elements that are number `first` … `last` of the region."""
    length = region.size[-1] if region.stride and region.stride[-1] == 1 else 1
    outer = len(region.size) - 1 if region.stride and region.stride[-1] == 1 else len(region.size)
    for rows, column, part in run_rows(first, last, length):
        yield region.start + column + offsets(rows, region.size[:outer], region.stride[:outer])[0], part


def indices_at(region: Region, positions: Indices) -> Indices:
    """The elements of a nested region that are number `positions` of it."""
    found: Indices = region.start + offsets(positions, region.size, region.stride)[0]
    return found


def cut(region: Region, first: int, last: int) -> Iterator[Region]:
    """Elements number `first` … `last` of a nested region, ascending, as few regions in normal form as that takes.

    At most two per dimension: the rest of a row, whole rows, the beginning of a row.
    """
    if first >= last:
        return
    if not region.size:
        yield region
        return
    size, stride, inner = region.size, region.stride, region.numel // region.size[0]
    (row, column), (end, rest) = divmod(first, inner), divmod(last, inner)

    def at(row: int) -> Region:
        return Region(region.start + row * stride[0], size[1:], stride[1:])

    if row == end:
        yield from cut(at(row), column, rest)
        return
    if column:
        yield from cut(at(row), column, inner)
        row += 1
    if row < end:
        yield Region.of(at(row).start, (end - row, *size[1:]), stride)
    if rest:
        yield from cut(at(end), 0, rest)


def run_rows(first: int, last: int, length: int) -> Iterator[tuple[Indices, int, int]]:
    """Cut positions `first` … `last` of rows of `length` elements into pieces: (row numbers, column, elements)."""
    while first < last:
        row, column = divmod(first, length)
        if column or last - first < length:
            count, part = 1, min(length - column, last - first)
        else:
            count, part = min((last - first) // length, PIECE), length
        yield np.arange(row, row + count, dtype=np.int64), column, part
        first += count * part


def offsets(positions: Indices, size: tuple[int, ...], *strides: tuple[int, ...]) -> list[Indices]:
    """Row-major `positions` in a box of `size`, unravelled and dotted with each of `strides`."""
    out = [np.zeros_like(positions) for _ in strides]
    for d in reversed(range(len(size))):
        positions, digit = np.divmod(positions, size[d])
        for total, stride in zip(out, strides, strict=True):
            total += digit * stride[d]
    return out


def contains(region: Region, indices: Indices) -> npt.NDArray[np.bool_]:
    """For each of `indices`, whether it is an element of the nested region."""
    rest = indices - region.start
    inside: npt.NDArray[np.bool_] = rest >= 0
    for n, s in zip(region.size, region.stride, strict=True):
        digit, rest = np.divmod(rest, s)
        inside &= digit < n
    inside &= rest == 0
    return inside


def disjoint(a: Region, b: Region) -> bool:
    """Whether two nested regions share no element; exact."""
    if a.last < b.start or b.last < a.start:
        return True
    if any(_apart(a, b, modulus) for modulus in {*a.stride, *b.stride}):
        return True
    # Shapes that no loader is known to produce: look at every element of the smaller one.
    small, large = (a, b) if a.numel <= b.numel else (b, a)
    for firsts, length in runs(small, large.start, large.last + 1):
        step = max(1, PIECE // length)
        for i in range(0, len(firsts), step):
            part = firsts[i : i + step, None]
            for column in range(0, length, PIECE):
                more = np.arange(column, min(column + PIECE, length), dtype=np.int64)
                if contains(large, (part + more).ravel()).any():
                    return False
    return True


def _apart(a: Region, b: Region, modulus: int) -> bool:
    """Whether the remainders of the two regions' indices lie in circular intervals that do not meet."""
    gap = (b.start - a.start) % modulus
    return _spread(a, modulus) < gap and gap + _spread(b, modulus) < modulus


def _spread(region: Region, modulus: int) -> int:
    """Remainders modulo `modulus` go from that of the start up by at most this."""
    return sum((n - 1) * s for n, s in zip(region.size, region.stride, strict=True) if s % modulus)


def overlaps(regions: list[Region]) -> Iterator[tuple[int, int]]:
    """Pairs of positions in `regions` (nested) that share an element."""
    order = sorted(range(len(regions)), key=lambda i: regions[i].start)
    if all(regions[i].last < regions[j].start for i, j in pairwise(order)):
        return
    open_: list[int] = []
    for i in order:
        open_ = [j for j in open_ if regions[j].last >= regions[i].start]
        yield from ((j, i) for j in open_ if not disjoint(regions[j], regions[i]))
        open_.append(i)
