"""Whether regions tile a tensor: each of its elements in exactly one of them."""

from collections.abc import Callable, Sequence
from itertools import islice

from chunkstore.regions import Region, count_below, overlaps

_SHOWN = 5
"""Overlaps that one tensor's refusal names."""


def tiling_problems(numel: int, regions: Sequence[Region], owners: Sequence[str]) -> list[str]:
    """Why `regions` (nested) do not tile a tensor of `numel` elements, naming elements and owners; empty if they do.

    `owners[i]` names whose `regions[i]` is.
    """
    beyond = [
        f"{owner} has element {region.last}, beyond the last one, {numel - 1}"
        for region, owner in zip(regions, owners, strict=True)
        if region.last >= numel
    ]
    if beyond:
        return beyond
    shared = [_overlap(regions, owners, i, j) for i, j in islice(overlaps(list(regions)), _SHOWN)]
    if shared or sum(region.numel for region in regions) == numel:
        return shared
    gap, end = _first_gap(numel, regions)
    return [f"nobody has elements {gap}…{end}"]


def _overlap(regions: Sequence[Region], owners: Sequence[str], i: int, j: int) -> str:
    first, last = max(regions[i].start, regions[j].start), min(regions[i].last, regions[j].last)
    return f"{owners[i]} and {owners[j]} both have elements among {first}…{last + 1}"


def _first_gap(numel: int, regions: Sequence[Region]) -> tuple[int, int]:
    """The first run of elements, start and end, that is in none of `regions`, which are disjoint."""

    def missing(stop: int) -> int:
        return stop - sum(count_below(stop, r.start, r.size, r.stride) for r in regions)

    first = _least(numel, lambda stop: missing(stop) > 0) - 1
    end = _least(numel, lambda stop: missing(stop) < stop - first)
    return first, end - 1 if missing(end) < end - first else end


def _least(limit: int, holds: Callable[[int], bool]) -> int:
    """The smallest number up to `limit` for which `holds`, which stays true once it is; `limit` if there is none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
