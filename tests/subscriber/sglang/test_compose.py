"""Two copies in a row, composed, against doing both on index tensors."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore.regions import Indices
from subscriber.sglang.boxes import Box
from subscriber.sglang.compose import MAX_PARTS, ZEROS, Copy, NotBoxes, compose
from tests.subscriber.sglang.test_boxes import index_tensor, start_and_strides, views


def elements(boxes: list[Box]) -> dict[int, tuple[int, int]]:
    """Target → (tensor, canonical element); no target twice."""
    out: dict[int, tuple[int, int]] = {}
    for box in boxes:
        at = np.indices(box.size).reshape(len(box.size), box.numel).T
        sources = box.source + at @ np.array(box.source_stride, np.int64)
        targets = box.target + at @ np.array(box.target_stride, np.int64)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            assert target not in out
            out[target] = (box.tensor, 0 if box.tensor == ZEROS else source)
    return out


def copy_of(source: Indices, target: Indices) -> Copy:
    (s, source_stride), (t, target_stride) = start_and_strides(source), start_and_strides(target)
    return Copy(s, t, source.shape, source_stride, target_stride)


@st.composite
def joins(draw: st.DrawFn) -> tuple[list[Box], list[tuple[int, int]], tuple[int, ...]]:
    """A temporary joined of views of tensors and zeros: its pieces, what lies at each of its elements, its shape."""
    first = draw(views())
    dim = draw(st.integers(0, max(first.ndim - 1, 0)))
    parts = [(0, first)]
    if first.ndim:
        for number in range(1, draw(st.integers(1, 3))):
            shape = (*first.shape[:dim], draw(st.integers(1, 4)), *first.shape[dim + 1 :])
            parts.append((draw(st.sampled_from([number, ZEROS])), draw(views(shape))))
        shape = (*first.shape[:dim], sum(view.shape[dim] for _, view in parts), *first.shape[dim + 1 :])
    else:
        shape = ()
    memory = index_tensor(shape)
    pieces, held, start = [], {}, 0
    for tensor, view in parts:
        if first.ndim:
            place = np.take(memory, range(start, start + view.shape[dim]), axis=dim)
            stride = start_and_strides(memory)[1]
            start += view.shape[dim]
        else:
            place, stride = memory, ()
        source, source_stride = start_and_strides(view)
        if tensor == ZEROS:
            source, source_stride = 0, (0,) * view.ndim
        pieces.append(Box.of(tensor, 0, source, int(place.flat[0]), view.shape, source_stride, stride))
        for at, element in zip(place.ravel().tolist(), view.ravel().tolist(), strict=True):
            held[at] = (tensor, 0 if tensor == ZEROS else element)
    return pieces, [held[i] for i in range(prod(shape))], shape


@given(joins(), st.data())
@settings(deadline=None, max_examples=300)
def test_compose(case: tuple[list[Box], list[tuple[int, int]], tuple[int, ...]], data: st.DataObject) -> None:
    pieces, held, shape = case
    slices = []
    for n in shape:
        first = data.draw(st.integers(0, n - 1))
        slices.append(slice(first, data.draw(st.integers(first + 1, n)), data.draw(st.integers(1, 2))))
    view = np.transpose(index_tensor(shape)[tuple(slices)], data.draw(st.permutations(range(len(shape)))))
    target = data.draw(views(view.shape))
    found = elements(compose(pieces, copy_of(view, target), 3))
    expected = {t: held[s] for s, t in zip(view.ravel().tolist(), target.ravel().tolist(), strict=True)}
    assert found == expected


def test_rows_and_columns_stay_few_boxes() -> None:
    above, below = Box.of(0, 0, 0, 0, (30, 8), (8, 1), (8, 1)), Box.of(1, 0, 0, 240, (20, 8), (8, 1), (8, 1))
    whole = Copy(0, 0, (50, 8), (8, 1), (8, 1))
    assert compose([above, below], whole, 0) == [above, below]
    left, right = Box.of(0, 0, 0, 0, (50, 3), (3, 1), (8, 1)), Box.of(1, 0, 0, 3, (50, 5), (5, 1), (8, 1))
    assert compose([left, right], whole, 0) == [left, right]


def test_what_is_not_a_few_boxes_is_refused() -> None:
    whole = Box.of(0, 0, 0, 0, (100,), (1,), (1,))
    with pytest.raises(NotBoxes, match="several places"):
        compose([whole], Copy(0, 0, (3, 5), (0, 1), (5, 1)), 0)
    with pytest.raises(NotBoxes, match="several places"):
        compose([whole], Copy(0, 0, (3, 5), (1, 1), (5, 1)), 0)
    with pytest.raises(NotBoxes, match="several in one"):
        compose([whole], Copy(0, 0, (3, 5), (5, 1), (0, 1)), 0)
    with pytest.raises(NotBoxes, match="nothing was written"):
        compose([whole], Copy(90, 0, (20,), (1,), (1,)), 0)
    combs = [Box.of(i, 0, 0, i, (MAX_PARTS,), (1,), (2,)) for i in range(2)]
    with pytest.raises(NotBoxes, match="more than"):
        compose(combs, Copy(0, 0, (2 * MAX_PARTS,), (1,), (1,)), 0)
