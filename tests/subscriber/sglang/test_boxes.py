"""The geometry of boxes against brute force: every view of index tensors says where each element lies."""

from dataclasses import replace
from math import prod

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore.regions import Indices, Region, contains, disjoint, overlaps
from chunkstore.regions import runs as region_runs
from manifest.catalog import Catalog, TensorSpec
from subscriber.errors import EngineMismatch
from subscriber.sglang.boxes import Box, BoxMap, Layout, Memory, Place, locate, runs


def index_tensor(shape: tuple[int, ...]) -> Indices:
    return np.arange(prod(shape), dtype=np.int64).reshape(shape)


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Indices:
    """A view of an index tensor: sliced, stepped, permuted. With `shape`: of exactly that shape."""
    if shape is None:
        full = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
        slices = []
        for n in full:
            first = draw(st.integers(0, n - 1))
            slices.append(slice(first, draw(st.integers(first + 1, n)), draw(st.integers(1, 3))))
        view = index_tensor(full)[tuple(slices)]
        return np.transpose(view, draw(st.permutations(range(view.ndim))))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    before = [draw(st.integers(0, 2)) for _ in shape]
    after = [draw(st.integers(0, 2)) for _ in shape]
    full = tuple(before[d] + steps[d] * shape[d] + after[d] for d in order)
    view = index_tensor(full)
    view = view[tuple(slice(before[d], before[d] + steps[d] * shape[d], steps[d]) for d in order)]
    return np.transpose(view, np.argsort(order))


def start_and_strides(view: Indices) -> tuple[int, tuple[int, ...]]:
    return int(view.flat[0]), tuple(s // 8 for s in view.strides)


def region_of(view: Indices) -> Region:
    start, stride = start_and_strides(view)
    return Region.of(start, view.shape, stride)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Box, Indices, Indices]:
    """A box, and its (canonical, live) element pairs in canonical order."""
    source = draw(views())
    target = draw(views(source.shape))
    (s, source_stride), (t, target_stride) = start_and_strides(source), start_and_strides(target)
    order = np.argsort(source, axis=None)
    box = Box.of(0, 0, s, t, source.shape, source_stride, target_stride)
    return box, source.ravel()[order], target.ravel()[order]


@given(boxes())
@settings(deadline=None)
def test_normal_form_keeps_the_elements(case: tuple[Box, Indices, Indices]) -> None:
    box, sources, targets = case
    assert box == Box.of(0, 0, box.source, box.target, box.size, box.source_stride, box.target_stride)
    assert all(n > 1 for n in box.size)
    assert box.source_region.nested
    assert box.target_region.nested
    at = np.indices(box.size).reshape(len(box.size), box.numel).T
    assert np.array_equal(box.source + at @ np.array(box.source_stride, np.int64), sources)
    assert np.array_equal(box.target + at @ np.array(box.target_stride, np.int64), targets)
    assert box.numel == len(sources)
    assert box.source_region.last == sources[-1]
    assert box.target_region.last == targets.max()


@given(boxes(), st.data())
@settings(deadline=None)
def test_locate(case: tuple[Box, Indices, Indices], data: st.DataObject) -> None:
    box, sources, targets = case
    some = data.draw(st.sets(st.integers(0, int(sources[-1]) + 5), max_size=60))
    indices = np.array(sorted(some), np.int64)
    positions, found = locate(box, indices)
    where = dict(zip(sources.tolist(), targets.tolist(), strict=True))
    assert positions.tolist() == [i for i, index in enumerate(indices.tolist()) if index in where]
    assert found.tolist() == [where[index] for index in indices.tolist() if index in where]
    assert positions.dtype == found.dtype == np.int64


@given(boxes(), st.data())
@settings(deadline=None)
def test_runs(case: tuple[Box, Indices, Indices], data: st.DataObject) -> None:
    box, sources, targets = case
    end = int(sources[-1]) + 3
    start = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(start, end))
    inside = (sources >= start) & (sources < stop)
    found_sources, found_targets = [], []
    for firsts, places, length in runs(box, start, stop):
        assert len(firsts) == len(places)
        found_sources += (firsts[:, None] + np.arange(length)).ravel().tolist()
        found_targets += (places[:, None] + np.arange(length)).ravel().tolist()
    assert found_sources == sources[inside].tolist()
    assert found_targets == targets[inside].tolist()


@given(views(), st.data())
@settings(deadline=None)
def test_region_runs_and_contains(view: Indices, data: st.DataObject) -> None:
    region = region_of(view)
    end = int(view.max()) + 3
    start = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(start, end))
    elements = np.sort(view, axis=None)
    found = [
        f + k for firsts, n in region_runs(region, start, stop) for f in firsts.tolist() for k in range(n)
    ]
    assert found == elements[(elements >= start) & (elements < stop)].tolist()
    assert np.flatnonzero(contains(region, np.arange(end))).tolist() == elements.tolist()


def test_few_runs_where_rows_are_long() -> None:
    box = Box.of(0, 0, 3, 0, (1000, 50), (100, 1), (50, 1))
    assert [(len(s), n) for s, _, n in runs(box, 0, 10**6)] == [(1000, 50)]
    assert [(len(s), n) for s, _, n in runs(box, 10, 30_010)] == [(1, 43), (299, 50), (1, 7)]
    whole = Box.of(0, 0, 0, 7, (1000, 50), (50, 1), (50, 1))
    assert (whole.size, whole.source_stride) == ((50_000,), (1,))
    assert [(s.tolist(), t.tolist(), n) for s, t, n in runs(whole, 5, 40_000)] == [([5], [12], 39_995)]


@st.composite
def two_views(draw: st.DrawFn) -> tuple[Indices, Indices]:
    """Two regions of one tensor; often of the kind that share out its rows, columns or every other element."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))

    def part() -> Indices:
        slices = []
        for n in shape:
            first = draw(st.integers(0, n - 1))
            slices.append(slice(first, draw(st.integers(first + 1, n)), draw(st.integers(1, 3))))
        return index_tensor(shape)[tuple(slices)]

    return part(), part()


@given(two_views())
@settings(deadline=None, max_examples=300)
def test_disjoint(pair: tuple[Indices, Indices]) -> None:
    a, b = pair
    expected = not set(a.ravel().tolist()) & set(b.ravel().tolist())
    assert disjoint(region_of(a), region_of(b)) == expected
    assert disjoint(region_of(b), region_of(a)) == expected
    assert list(overlaps([region_of(a), region_of(b)])) == ([] if expected else [(0, 1)]) or list(
        overlaps([region_of(a), region_of(b)])
    ) == [(1, 0)]


def test_irregular_regions_are_compared_element_by_element() -> None:
    every_third, every_second = Region(0, (4,), (3,)), Region(1, (2,), (4,))
    assert disjoint(every_third, every_second)  # 0 3 6 9 and 1 5
    assert not disjoint(every_third, Region(1, (3,), (4,)))  # 1 5 9
    long = Region(0, (300_000,), (3,))
    assert not disjoint(long, Region(1, (200_000,), (4,)))


def test_windows_and_broadcasts_are_not_nested() -> None:
    assert not Region.of(0, (5, 3), (1, 1)).nested
    assert not Region.of(0, (5, 3), (0, 1)).nested
    assert Region.of(0, (5, 3), (1, 7)).nested


CATALOG = Catalog.of(
    [
        TensorSpec("a", "BF16", (4, 6)),
        TensorSpec("b", "BF16", (6,)),
        TensorSpec("c", "F32", ()),
        TensorSpec("d", "BF16", (0, 3)),
    ]
)
GOOD = BoxMap(
    CATALOG.hash,
    (Memory("fused", "BF16", 32), Memory("c", "F32", 1)),
    (
        Box.of(0, 0, 0, 2, (4, 3), (6, 1), (3, 1)),
        Box.of(0, 0, 3, 14, (4, 3), (6, 1), (3, 1)),
        Box.of(1, 0, 0, 26, (6,), (1,), (1,)),
        Box.of(2, 1, 0, 0, (), (), ()),
    ),
)


def test_wire_form_round_trip() -> None:
    assert BoxMap.from_bytes(GOOD.to_bytes(), CATALOG) == GOOD


BAD_BOXES = {
    "overlap": (replace(GOOD.boxes[0], target=13), "'a' and 'a' both lie in the same elements of 'fused'"),
    "beyond the tensor": (replace(GOOD.boxes[0], source=22), "goes beyond"),
    "beyond the tensor by one": (replace(GOOD.boxes[0], source=4), "goes beyond"),
    "beyond the memory": (replace(GOOD.boxes[2], target=27), "goes beyond"),
    "dtype": (replace(GOOD.boxes[2], memory=1), "'b' is BF16 in the catalog, but lies in 'c' of F32"),
    "no such tensor": (replace(GOOD.boxes[3], tensor=4), "do not exist"),
    "no such memory": (replace(GOOD.boxes[3], memory=2), "do not exist"),
    "broadcast": (replace(GOOD.boxes[2], source_stride=(0,)), "holds an element twice"),
    "folded": (replace(GOOD.boxes[2], target_stride=(0,)), "holds an element twice"),
    "not merged": (
        replace(GOOD.boxes[2], size=(2, 3), source_stride=(3, 1), target_stride=(3, 1)),
        "not in normal form",
    ),
    "size 1": (
        replace(GOOD.boxes[3], size=(1,), source_stride=(1,), target_stride=(1,)),
        "not in normal form",
    ),
    "ragged": (replace(GOOD.boxes[2], source_stride=(6, 1)), "other strides"),
}


@pytest.mark.parametrize("case", BAD_BOXES)
def test_bad_boxes_are_refused_by_name(case: str) -> None:
    box, message = BAD_BOXES[case]
    others = [b for b in GOOD.boxes if (b.tensor, b.source) != (box.tensor, box.source)]
    if case == "overlap":
        others = list(GOOD.boxes[1:])
    if case.startswith(("beyond the tensor", "no such")):
        others = []
    ordered = sorted([*others, box], key=lambda b: (b.tensor, b.source))
    with pytest.raises(EngineMismatch, match=message):
        BoxMap.from_bytes(replace(GOOD, boxes=tuple(ordered)).to_bytes(), CATALOG)


def test_all_offenders_are_named() -> None:
    bad = replace(GOOD, memories=(Memory("fused", "F16", 32), Memory("c", "U8", 1)))
    with pytest.raises(EngineMismatch) as error:
        BoxMap.from_bytes(bad.to_bytes(), CATALOG)
    assert all(f"'{name}' is " in error.value.message for name in "abc")


def test_unreadable_maps_are_refused() -> None:
    wire = msgpack.unpackb(GOOD.to_bytes())
    good = GOOD.to_bytes()
    for data in (
        b"",
        b"\xc1",
        good[:-1],
        good + b"\0",
        msgpack.packb({**wire, "format": 2}),
        msgpack.packb({**wire, "more": 1}),
        msgpack.packb({**wire, "catalog": b"short"}),
        msgpack.packb({**wire, "boxes": [[0, 0, -1, 0, [], [], []]]}),
        msgpack.packb({**wire, "boxes": [[0, 0, 0.0, 0, [], [], []]]}),
        msgpack.packb({**wire, "boxes": [[0, 0, 1 << 60, 0, [], [], []]]}),
        replace(GOOD, catalog=bytes(32)).to_bytes(),
        replace(GOOD, boxes=GOOD.boxes[::-1]).to_bytes(),
        replace(GOOD, memories=(Memory("fused", "F4", 32), GOOD.memories[1])).to_bytes(),
    ):
        with pytest.raises(EngineMismatch):
            BoxMap.from_bytes(data, CATALOG)


def test_layout_owners_and_replicas() -> None:
    rows = Catalog.of([TensorSpec("w", "BF16", (8, 4)), TensorSpec("n", "BF16", (4,))])
    memories = (Memory("n", "BF16", 4), Memory("w", "BF16", 32))
    norm = Box.of(0, 0, 0, 0, (4,), (1,), (1,))
    columns = [
        # Both ranks keep the first half of the columns, rank 1 the second half too, transposed.
        (Box.of(1, 1, 0, 0, (8, 2), (4, 1), (2, 1)),),
        (Box.of(1, 1, 0, 16, (8, 2), (4, 1), (1, 8)), Box.of(1, 1, 2, 0, (8, 2), (4, 1), (2, 1))),
    ]
    maps = [BoxMap(rows.hash, memories, (norm, *boxes)) for boxes in columns]
    for map_ in maps:
        map_.check(rows)
    layout = Layout(rows, maps)
    assert layout.places == (
        (Place(0, 0, None), Place(1, 0, (0, 0))),
        (Place(0, 1, None), Place(1, 1, (0, 1)), Place(1, 2, None)),
    )
    assert [place.owner for place in layout.places[1]] == [True, False, True]


def test_layout_replicas_whose_boxes_are_split_by_their_memory() -> None:
    """The same canonical elements are one region, however many dimensions the two sides need."""
    one = Catalog.of([TensorSpec("w", "BF16", (4, 4))])
    flat = Box.of(0, 0, 0, 0, (4, 4), (4, 1), (4, 1))
    padded = Box.of(0, 0, 0, 0, (4, 4), (4, 1), (8, 1))
    assert flat.size != padded.size
    maps = [BoxMap(one.hash, (Memory("w", "BF16", 32),), (box,)) for box in (flat, padded)]
    assert Layout(one, maps).places == ((Place(0, 0, None), Place(1, 0, (0, 0))),)


def test_layout_names_every_tensor_that_is_not_held_exactly_once() -> None:
    catalog = Catalog.of([TensorSpec(name, "BF16", (4, 4)) for name in ("absent", "cut", "fine", "half")])
    memory = (Memory("m", "BF16", 16),)

    def box(tensor: int, source: int, rows: int) -> Box:
        return Box.of(tensor, 0, source, 0, (rows, 4), (4, 1), (4, 1))

    maps = [
        BoxMap(catalog.hash, memory, boxes)
        for boxes in ((box(1, 0, 3),), (box(1, 8, 2),), (box(2, 0, 4),), (box(3, 0, 2),), (box(3, 0, 2),))
    ]
    with pytest.raises(EngineMismatch) as error:
        Layout(catalog, maps)
    assert "'absent' has 16 elements, the engine holds 0" in error.value.message
    assert "'cut' is held in pieces that overlap only partly" in error.value.message
    assert "'half' has 16 elements, the engine holds 8" in error.value.message
    assert "'fine'" not in error.value.message
