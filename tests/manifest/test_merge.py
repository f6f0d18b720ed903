"""Merging: one update equals applying every section, one version after the other."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkstore import difference
from chunkstore.codec import WINDOW, Section
from chunkstore.dtypes import Bits, bits_dtype
from manifest.catalog import TensorSpec
from manifest.merge import Update, merge, resolve


def apply_section(state: Bits, section: Section) -> None:
    at = (
        slice(section.start, section.stop)
        if section.offsets is None
        else section.start + section.offsets.astype(int)
    )
    state[at] = difference.add(state[at], section.values) if section.relative else section.values


def apply_update(state: Bits, update: Update) -> None:
    """As a subscriber does: gather what is there, resolve, write."""
    live = state[update.start : update.stop]
    update = resolve(update, live if update.offsets is None else live[update.offsets])
    assert update.relative is None
    if update.offsets is None:
        state[update.start : update.stop] = update.values
    else:
        state[update.start + update.offsets.astype(np.int64)] = update.values


@st.composite
def sections(draw: st.DrawFn, dtype: str, numel: int, window: int) -> Section:
    low, high = window * WINDOW, min((window + 1) * WINDOW, numel)
    start = draw(st.integers(low, high - 1))
    stop = draw(st.integers(start + 1, high))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    offsets: npt.NDArray[np.uint32] | None = None
    if dtype in ("BF16", "F16") and draw(st.booleans()):
        wanted = draw(st.integers(1, min(stop - start, 50)))
        offsets = np.unique(rng.integers(0, stop - start, wanted)).astype(np.uint32)
    relative = offsets is not None and draw(st.booleans())
    kind = bits_dtype(dtype)
    size = stop - start if offsets is None else len(offsets)
    values = rng.integers(int(relative), 1 << 8 * kind.itemsize, size, kind)
    return Section(0, dtype, start, stop, offsets, values, relative)


@given(st.data(), st.integers(1, 90), st.sampled_from(["BF16", "F16", "F32", "U8", "F64"]))
def test_merge_equals_applying_one_by_one(data: st.DataObject, numel: int, dtype: str) -> None:
    parts = data.draw(st.lists(sections(dtype, numel, 0), max_size=6))
    kind = bits_dtype(dtype)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    state = rng.integers(0, 1 << 8 * kind.itemsize, numel, kind)
    merged = state.copy()
    for section in parts:
        apply_section(state, section)
    update = merge(TensorSpec("w", dtype, (numel,)), 0, 0, iter(parts))
    assert (update.start, update.stop, update.values.dtype) == (0, numel, bits_dtype(dtype))
    apply_update(merged, update)
    np.testing.assert_array_equal(merged, state)
    if update.offsets is not None:
        assert update.offsets.dtype == np.uint32
        assert (np.diff(update.offsets.astype(np.int64)) > 0).all()
    places = np.arange(numel) if update.offsets is None else update.offsets.astype(int)
    touched = {
        i for s in parts for i in range(s.start, s.stop) if s.offsets is None or i - s.start in s.offsets
    }
    assert len(update.values) == len(touched)
    differences = {
        i for s in parts if s.relative and s.offsets is not None for i in s.start + s.offsets.astype(int)
    }
    absolute = {
        i
        for s in parts
        if not s.relative
        for i in (range(s.start, s.stop) if s.offsets is None else s.start + s.offsets.astype(int))
    }
    left = [] if update.relative is None else places[update.relative].tolist()
    assert left == sorted(differences - absolute)
    assert (update.offsets is None) == (len(touched) == numel)


def few(values: list[int], relative: bool) -> Section:
    """The first elements of a tensor of four."""
    offsets = np.arange(len(values), dtype=np.uint32)
    return Section(0, "BF16", 0, 4, offsets, np.array(values, np.uint16), relative)


def test_a_difference_needs_the_base_only_where_nothing_absolute_came_before() -> None:
    spec = TensorSpec("w", "BF16", (4,))
    chain = [few([0x0000], False), few([1, 0xFFFF], True), few([0xFFFE, 0xFFFF], True)]
    update = merge(spec, 0, 0, chain)
    assert update.values.tolist() == [0x8000, 0xFFFE]  # +0, up by 1, down by 2: −0
    assert update.relative is not None
    assert update.relative.tolist() == [False, True]
    assert resolve(update, np.array([0x7FC1, 0x0001], np.uint16)).values.tolist() == [0x8000, 0x8000]
    after = merge(spec, 0, 0, [*chain, few([1, 2, 3], False)])
    assert (after.values.tolist(), after.relative) == ([1, 2, 3], None)
    assert resolve(after, np.zeros(3, np.uint16)) is after


def test_windows_after_the_first() -> None:
    numel = WINDOW + 1000
    rng = np.random.default_rng(1)
    whole = Section(3, "BF16", WINDOW + 10, WINDOW + 500, None, rng.integers(0, 1 << 16, 490, np.uint16))
    sparse = Section(
        3, "BF16", WINDOW, numel, np.array([0, 10, 999], np.uint32), np.array([1, 2, 3], np.uint16)
    )
    update = merge(TensorSpec("w", "BF16", (numel,)), 3, 1, [whole, sparse])
    assert (update.tensor, update.start, update.stop) == (3, WINDOW, numel)
    state, merged = np.zeros(numel, np.uint16), np.zeros(numel, np.uint16)
    apply_section(state, whole)
    apply_section(state, sparse)
    apply_update(merged, update)
    np.testing.assert_array_equal(merged, state)


def test_nothing_to_merge() -> None:
    update = merge(TensorSpec("w", "BF16", (5,)), 0, 0, [])
    assert update.offsets is not None
    assert len(update.offsets) == len(update.values) == 0


def test_sections_of_another_tensor_or_window_are_a_bug() -> None:
    section = Section(0, "BF16", 0, 4, None, np.zeros(4, np.uint16))
    with pytest.raises(AssertionError):
        merge(TensorSpec("w", "BF16", (4,)), 1, 0, [section])
    with pytest.raises(AssertionError):
        merge(TensorSpec("w", "BF16", (WINDOW + 4,)), 0, 1, [section])
