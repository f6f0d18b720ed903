"""Sections and chunks: everything that goes in comes out, at about the size the entropy allows."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore import difference, rice
from chunkstore.bitpack import pack, packed_size, unpack
from chunkstore.codec import (
    MAX_SECTIONS,
    WINDOW,
    ChunkReader,
    Encoding,
    Section,
    encode_section,
    group_sections,
    pack_chunk,
)
from chunkstore.dtypes import WIDTH, bits_dtype
from chunkstore.errors import LimitExceeded
from chunkstore.rice import decode_offsets, encode_offsets

BF16_SPECIALS = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF, 0x0001, 0x8001]

ONE = np.array([1], np.uint32)


def random_values(rng: np.random.Generator, dtype: str, count: int) -> npt.NDArray[Any]:
    """Arbitrary bit patterns: NaN payloads, infinities, zeros of both signs among them."""
    bits = bits_dtype(dtype)
    values = rng.integers(0, 256, count * bits.itemsize, dtype=np.uint8).view(bits)
    if bits.itemsize == 2 and count:
        values[rng.integers(0, count, 10)] = BF16_SPECIALS
    return values


def sparse(rng: np.random.Generator, size: int, density: float, tensor: int = 0, start: int = 0) -> Section:
    offsets = np.flatnonzero(rng.random(size) < density).astype(np.uint32)
    if not len(offsets):
        offsets = np.array([rng.integers(0, size)], dtype=np.uint32)
    values = random_values(rng, "BF16", len(offsets))
    return Section(tensor, "BF16", start, start + size, offsets, values)


def dense(
    rng: np.random.Generator, dtype: str, size: int, tensor: int = 0, start: int = 0, rich: bool = True
) -> Section:
    values = random_values(rng, dtype, size) if rich else np.zeros(size, bits_dtype(dtype))
    return Section(tensor, dtype, start, start + size, None, values)


def assert_same(got: Section, expected: Section) -> None:
    assert (got.tensor, got.dtype, got.start, got.stop) == (
        expected.tensor,
        expected.dtype,
        expected.start,
        expected.stop,
    )
    assert got.values.dtype == expected.values.dtype
    np.testing.assert_array_equal(got.values, expected.values)
    assert (got.whole, got.relative) == (expected.whole, expected.relative)
    if got.offsets is not None and expected.offsets is not None:
        assert got.offsets.dtype == np.uint32
        np.testing.assert_array_equal(got.offsets, expected.offsets)


def round_trip(*sections: Section) -> None:
    encoded = [encode_section(s) for s in sections]
    reader = ChunkReader(pack_chunk(encoded), name="chunk-under-test")
    assert reader.sections == tuple(e.info for e in encoded)
    for i, section in enumerate(sections):
        assert_same(reader.decode(i), section)


@given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=70))
def test_bit_packing_is_one_bit_stream(width: int, raw: list[int]) -> None:
    values = np.array(raw, dtype=np.uint8) & np.uint8((1 << width) - 1)
    data = pack(values, width)
    assert len(data) == packed_size(len(values), width)
    stream = int.from_bytes(data, "little")
    assert [stream >> i * width & (1 << width) - 1 for i in range(len(values))] == values.tolist()
    assert stream >> len(values) * width == 0
    np.testing.assert_array_equal(unpack(np.frombuffer(data, np.uint8), len(values), width), values)


@given(st.sets(st.integers(0, WINDOW - 1), min_size=1, max_size=200), st.integers(0, 21))
def test_offsets_survive_any_gaps(raw: set[int], cluster: int) -> None:
    """Few, far, adjacent, and clustered ones: gaps of every length, with and without escapes."""
    offsets = np.unique(np.array(sorted({x for v in raw for x in (v, v >> cluster)}), dtype=np.uint32))
    split = encode_offsets(offsets)
    back = decode_offsets(split.r, split.low, split.high, split.escapes, int(offsets[-1]) + 1)
    assert back is not None
    np.testing.assert_array_equal(back, offsets)
    assert decode_offsets(split.r, split.low, split.high, split.escapes, int(offsets[-1])) is None


def test_escapes_are_used_and_come_back() -> None:
    offsets = np.concatenate([np.arange(5000), [WINDOW - 2, WINDOW - 1]]).astype(np.uint32)
    split = encode_offsets(offsets)
    assert split.escapes
    back = decode_offsets(split.r, split.low, split.high, split.escapes, WINDOW)
    np.testing.assert_array_equal(back, offsets)


@pytest.mark.parametrize("r", [0, 1, 7, 8, 9, 13])
def test_high_parts_on_either_side_of_the_escape(r: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chance hardly ever draws the gap whose high part is just the one that says "more follows"."""
    monkeypatch.setattr(rice, "choose_rice", lambda gaps: r)
    highs = np.array([0, 254, 255, 256, 255, 1])
    gaps = (highs << r) + np.array([0, 0, 0, 0, (1 << r) - 1, 0])
    offsets = (np.cumsum(gaps + 1) - 1).astype(np.uint32)
    split = encode_offsets(offsets)
    assert split.r == r
    back = decode_offsets(split.r, split.low, split.high, split.escapes, int(offsets[-1]) + 1)
    np.testing.assert_array_equal(back, offsets)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 60_000),
    st.sampled_from([0.0, 1e-4, 0.003, 0.01, 0.3, 0.99, 1.0]),
    st.sampled_from([0, 1, WINDOW - 60_000, (1 << 39) + 17]),
)
def test_sparse_sections_round_trip(seed: int, size: int, density: float, start: int) -> None:
    round_trip(sparse(np.random.default_rng(seed), size, density, tensor=7, start=start))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.sampled_from(sorted(WIDTH)), st.integers(1, 30_000), st.booleans())
def test_whole_sections_round_trip_in_every_dtype(seed: int, dtype: str, size: int, rich: bool) -> None:
    round_trip(dense(np.random.default_rng(seed), dtype, size, start=5, rich=rich))


def patterns(count: int) -> st.SearchStrategy[npt.NDArray[np.uint16]]:
    """16-bit floats, with the special ones and their neighbours as likely as all others."""
    specials = st.sampled_from([x + d & 0xFFFF for x in BF16_SPECIALS for d in (-1, 0, 1)])
    return st.lists(st.one_of(specials, st.integers(0, 0xFFFF)), min_size=count, max_size=count).map(
        lambda values: np.array(values, np.uint16)
    )


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(patterns(n), patterns(n))))
def test_differences_lead_from_any_old_bits_to_any_new_ones(pair: tuple[Any, Any]) -> None:
    """NaN payloads, zeros of both signs, infinities; wrapping around where the two lie far apart."""
    new, old = pair
    moved = difference.difference(new, old)
    np.testing.assert_array_equal(difference.add(old, moved), new)
    np.testing.assert_array_equal(moved == 0, new == old)
    section = Section(0, "F16", 0, len(new), np.arange(len(new), dtype=np.uint32), moved, relative=True)
    if moved.all():
        encoded = encode_section(section)
        assert encoded.encoding is Encoding.DELTA
        round_trip(section)


def test_order_sorts_as_numbers_do() -> None:
    """Of all floats that are numbers, with −0 directly below +0; and it is a bijection."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    ordered = difference.order(bits)
    np.testing.assert_array_equal(difference.unorder(ordered), bits)
    assert sorted(ordered.tolist()) == bits.tolist()
    values = np.empty(1 << 16, np.float32)
    values[ordered] = (bits.astype(np.uint32) << 16).view(np.float32)
    numbers = values[~np.isnan(values)]
    assert (np.diff(numbers) >= 0).all()
    assert difference.order(np.array([0x8000, 0x0000], np.uint16)).tolist() == [0x7FFF, 0x8000]
    assert difference.order(np.array([0xFFFF, 0x7FFF], np.uint16)).tolist() == [0, 0xFFFF]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(1, 60_000), st.sampled_from([1e-4, 0.01, 0.99]), st.booleans())
def test_sections_with_old_values_round_trip(seed: int, size: int, density: float, near: bool) -> None:
    rng = np.random.default_rng(seed)
    section = with_old(sparse(rng, size, density), rng, near)
    encoded = encode_section(section)
    read = ChunkReader(pack_chunk([encoded]), name="x").decode(0)
    read.check()
    assert read.relative == (encoded.encoding is Encoding.DELTA)
    assert section.old is not None
    values = difference.add(section.old, read.values) if read.relative else read.values
    np.testing.assert_array_equal(values, section.values)
    np.testing.assert_array_equal(read.offsets, section.offsets)


def with_old(section: Section, rng: np.random.Generator, near: bool) -> Section:
    """With old values: one or a few representable values away as in training, or anywhere."""
    count = len(section.values)
    if near:
        steps = rng.geometric(0.87, count).astype(np.uint16)
        moved = np.where(rng.random(count) < 0.5, steps, -steps).astype(np.uint16)
    else:
        moved = rng.integers(1, 1 << 16, count).astype(np.uint16)
    return replace(section, old=difference.add(section.values, -moved))


def test_the_smaller_of_the_two_sparse_encodings_is_taken() -> None:
    rng = np.random.default_rng(6)
    section = sparse(rng, 100_000, 0.1)
    near, far = with_old(section, rng, near=True), with_old(section, rng, near=False)
    constant = replace(far, values=np.full_like(far.values, 0x3F80), old=far.old)
    constant = replace(constant, old=np.where(far.old == 0x3F80, np.uint16(0), far.old))  # type: ignore[arg-type]
    for candidate, expected in [(near, "delta"), (far, "absolute"), (constant, "absolute")]:
        chosen, absolute = encode_section(candidate), encode_section(replace(candidate, old=None))
        assert chosen.encoding == expected
        assert chosen.nbytes < absolute.nbytes if expected == "delta" else chosen == absolute


def test_full_window_and_many_sections_in_one_chunk() -> None:
    rng = np.random.default_rng(1)
    round_trip(
        sparse(rng, WINDOW, 0.01),
        dense(rng, "F32", 1000, tensor=3, start=WINDOW - 1000),
        dense(rng, "BF16", WINDOW, tensor=2, rich=False),
        sparse(rng, 10, 0.5, tensor=3, start=WINDOW),
        dense(rng, "BOOL", 1, tensor=9),
        Section(4, "F16", 0, WINDOW, np.array([WINDOW - 1], np.uint32), np.array([0xFC00], np.uint16)),
    )


def test_sections_read_from_views() -> None:
    """Callers may hand in slices of larger or strided arrays."""
    values = np.arange(200, dtype=np.uint16)[::2]
    offsets = np.arange(0, 1000, 5, dtype=np.uint32)[::2]
    round_trip(Section(0, "BF16", 0, 1000, offsets, values))
    round_trip(Section(0, "BF16", 0, 100, None, values))


@pytest.mark.parametrize(("density", "ratio"), [(0.002, 1.025), (0.01, 1.01), (0.05, 1.02), (0.3, 1.015)])
def test_size_is_close_to_the_entropy(density: float, ratio: float) -> None:
    """Independent changes of real-looking weights, against index entropy plus 11 bits per value."""
    rng = np.random.default_rng(2)
    offsets = np.flatnonzero(rng.random(WINDOW) < density).astype(np.uint32)
    weights = rng.normal(0, 0.02, len(offsets)).astype(np.float32)
    values = (weights.view(np.uint32) >> 16).astype(np.uint16)
    size = len(pack_chunk([encode_section(Section(0, "BF16", 0, WINDOW, offsets, values))]))
    p = density
    index = -(p * np.log2(p) + (1 - p) * np.log2(1 - p)) / p
    assert size * 8 / len(offsets) < ratio * (index + 11)


@pytest.mark.parametrize("density", [0.002, 0.01, 0.05])
def test_differences_are_close_to_the_entropy(density: float) -> None:
    """Independent changes by mostly one representable value, against index entropy plus value entropy."""
    rng = np.random.default_rng(2)
    offsets = np.flatnonzero(rng.random(WINDOW) < density).astype(np.uint32)
    section = with_old(
        Section(0, "BF16", 0, WINDOW, offsets, random_values(rng, "BF16", len(offsets))), rng, True
    )
    size = len(pack_chunk([encode_section(section)]))
    index, value = (-(q * np.log2(q) + (1 - q) * np.log2(1 - q)) / q for q in (density, 0.87))
    assert size * 8 / len(offsets) < 1.04 * (index + 1 + value)


def test_clustered_changes_cost_almost_no_index() -> None:
    """Whole rows of an embedding: the gaps repeat, and the encoding must profit."""
    rows = np.arange(0, 4096, 97)
    offsets = (rows[:, None] * 1024 + np.arange(1024)).ravel().astype(np.uint32)
    encoded = encode_section(Section(0, "BF16", 0, WINDOW, offsets, np.zeros(len(offsets), np.uint16)))
    assert encoded.nbytes * 8 / len(offsets) < 0.1


def test_encoding_follows_the_section() -> None:
    rng = np.random.default_rng(3)
    whole, changed = encode_section(dense(rng, "BF16", 100)), encode_section(sparse(rng, 100, 0.1))
    assert (whole.encoding, changed.encoding) == (Encoding.DENSE, Encoding.ABSOLUTE)
    assert whole.info.whole
    assert not changed.info.whole


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (Section(0, "BF16", 5, 5, None, np.zeros(0, np.uint16)), "empty"),
        (Section(0, "BF16", 0, 9, np.zeros(0, np.uint32), np.zeros(0, np.uint16)), "offsets are"),
        (Section(0, "BF16", WINDOW - 1, WINDOW + 1, None, np.zeros(2, np.uint16)), "crosses"),
        (Section(0, "BF16", 0, 2, None, np.zeros(2, np.uint32)), "values are uint32"),
        (Section(0, "BF16", 0, 2, None, np.zeros((1, 2), np.uint16)), "2 dimensions"),
        (Section(0, "BF16", 0, 3, None, np.zeros(2, np.uint16)), "2 values"),
        (Section(0, "Q4", 0, 3, None, np.zeros(3, np.uint16)), "unknown dtype"),
        (Section(0, "F32", 0, 3, np.zeros(1, np.uint32), np.zeros(1, np.uint32)), "stored whole only"),
        (Section(0, "BF16", 0, 1, None, np.ones(1, np.uint16), True), "whole sections have no differences"),
        (Section(0, "BF16", 0, 9, ONE, np.zeros(1, np.uint16), True), "a difference is 0"),
        (Section(0, "BF16", 0, 9, ONE, np.ones(1, np.uint16), True, ONE.astype(np.uint16)), "no old values"),
        (Section(0, "BF16", 0, 9, ONE, np.ones(1, np.uint16), old=np.ones(1, np.uint16)), "equals its old"),
        (Section(0, "BF16", 0, 9, ONE, np.ones(1, np.uint16), old=np.zeros(2, np.uint16)), "old values are"),
        (Section(0, "BF16", 0, 9, np.array([3, 3], np.uint32), np.zeros(2, np.uint16)), "increasing"),
        (Section(0, "BF16", 0, 9, np.array([3, 9], np.uint32), np.zeros(2, np.uint16)), "increasing"),
    ],
)
def test_impossible_sections_are_not_encoded(section: Section, problem: str) -> None:
    """In particular, a section without elements: no change means no section."""
    with pytest.raises(ValueError, match=problem):
        encode_section(section)


def test_chunk_limits_when_writing() -> None:
    rng = np.random.default_rng(4)
    one = encode_section(dense(rng, "U8", 4))
    with pytest.raises(LimitExceeded, match="not 0"):
        pack_chunk([])
    with pytest.raises(LimitExceeded, match=str(MAX_SECTIONS)):
        pack_chunk([one] * (MAX_SECTIONS + 1))
    with pytest.raises(ValueError, match="overlap"):
        pack_chunk([one, one])


def test_the_largest_number_of_sections_fits_the_header() -> None:
    """Ids and positions as long as they get."""
    base = (1 << 40) - (WINDOW * MAX_SECTIONS)
    values, offsets = np.array([1], np.uint16), np.array([WINDOW - 1], np.uint32)
    sections = [
        encode_section(
            Section((1 << 20) - 1, "BF16", base + i * WINDOW, base + (i + 1) * WINDOW, offsets, values)
        )
        for i in range(MAX_SECTIONS)
    ]
    assert len(ChunkReader(pack_chunk(sections), name="x").sections) == MAX_SECTIONS


def test_grouping_keeps_order_and_limits() -> None:
    rng = np.random.default_rng(5)
    sections = [encode_section(dense(rng, "BF16", 500, tensor=i)) for i in range(50)]
    groups = list(group_sections(sections, 5000))
    assert [s for g in groups for s in g] == sections
    assert all(sum(s.nbytes for s in g) <= 5000 for g in groups)
    assert len(groups) > 8
    assert [len(g) for g in group_sections(sections, 1)] == [1] * 50
    many = [sections[0]] * (MAX_SECTIONS + 1)
    assert [len(g) for g in group_sections(many, 1 << 40)] == [MAX_SECTIONS, 1]
