"""Tilings against brute force: boxes cut out of tensors, some of them missing, doubled or moved."""

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore.regions import Indices, Region
from manifest.tiling import tiling_problems


def region_of(view: Indices) -> Region:
    return Region.of(int(view.flat[0]), view.shape, [s // 8 for s in view.strides])


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[int, list[Indices]]:
    """A tensor's number of elements, and index views that tile it: cut along axes, or every other row."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    views = [np.arange(prod(shape), dtype=np.int64).reshape(shape)]
    for _ in range(draw(st.integers(0, 5))):
        view = views.pop(draw(st.integers(0, len(views) - 1)))
        axis = draw(st.integers(0, view.ndim - 1))
        moved, n = np.moveaxis(view, axis, 0), view.shape[axis]
        at = draw(st.integers(1, max(1, n - 1)))
        parts = (moved[::2], moved[1::2]) if draw(st.booleans()) else (moved[:at], moved[at:])
        views += [part for part in parts if part.size]
    return prod(shape), draw(st.permutations(views))


@given(cut_tensors())
@settings(deadline=None)
def test_what_tiles_has_no_problems(case: tuple[int, list[Indices]]) -> None:
    numel, views = case
    assert tiling_problems(numel, [region_of(v) for v in views], ["w"] * len(views)) == []


@given(cut_tensors(), st.data())
@settings(deadline=None)
def test_gaps_and_overlaps_are_found_and_named(case: tuple[int, list[Indices]], data: st.DataObject) -> None:
    numel, views = case
    names = [f"writer {i}" for i in range(len(views))]
    number = data.draw(st.integers(0, len(views) - 1))
    if data.draw(st.booleans()):
        del views[number], names[number]
        counts = Counter(int(i) for view in views for i in view.flat)
        absent = [i for i in range(numel) if not counts[i]]
        end = next(i for i in range(absent[0], numel + 1) if counts[i] or i == numel)
        wanted = f"nobody has elements {absent[0]}…{end}"
        assert tiling_problems(numel, [region_of(v) for v in views], names) == [wanted]
    else:
        views.append(views[number])
        problems = tiling_problems(numel, [region_of(v) for v in views], [*names, "the twin"])
        assert problems
        assert all(names[number] in problem and "the twin" in problem for problem in problems)


@pytest.mark.parametrize(
    ("regions", "problem"),
    [
        ([Region(0, (5,), (1,)), Region(5, (6,), (1,))], "b has element 10, beyond the last one, 9"),
        ([Region(0, (5,), (1,)), Region(4, (6,), (1,))], "a and b both have elements among 4…5"),
        ([Region(0, (5,), (1,)), Region(6, (4,), (1,))], "nobody has elements 5…6"),
        ([Region(0, (5,), (1,)), Region(5, (4,), (1,))], "nobody has elements 9…10"),
        ([Region(1, (5,), (1,)), Region(6, (4,), (1,))], "nobody has elements 0…1"),
    ],
)
def test_refusals(regions: list[Region], problem: str) -> None:
    assert tiling_problems(10, regions, ["a", "b"]) == [problem]


def test_nothing_tiles_an_empty_tensor_only() -> None:
    assert tiling_problems(0, [], []) == []
    assert tiling_problems(3, [], []) == ["nobody has elements 0…3"]
