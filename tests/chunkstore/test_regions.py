"""Cutting strided regions by the numbers of their elements."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chunkstore.regions import Region, cut, indices_at, nested


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """A nested region in normal form."""
    size: list[int] = []
    stride: list[int] = []
    extent = 0
    for _ in range(draw(st.integers(0, 4))):
        step, count = extent + draw(st.integers(1, 5)), draw(st.integers(2, 5))
        size.insert(0, count)
        stride.insert(0, step)
        extent += (count - 1) * step
    return Region.of(draw(st.integers(0, 50)), size, stride)


@given(regions(), st.data())
def test_the_parts_are_the_elements_in_order(region: Region, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, region.numel))
    last = data.draw(st.integers(first, region.numel))
    parts = list(cut(region, first, last))
    assert all(part == Region.of(part.start, part.size, part.stride) for part in parts)
    assert all(nested(part.size, part.stride) for part in parts)
    assert len(parts) <= max(1, 2 * len(region.size) - 1)
    found = [indices_at(part, np.arange(part.numel)) for part in parts]
    wanted = indices_at(region, np.arange(first, last))
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *found]), wanted)
