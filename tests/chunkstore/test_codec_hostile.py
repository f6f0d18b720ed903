"""Hostile bytes: whatever they are, decoding ends in a section or a typed error that names the object."""

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore.codec import (
    MAX_CHUNK,
    MAX_HEADER,
    MAX_SECTIONS,
    WINDOW,
    ChunkReader,
    Encoding,
    Section,
    encode_section,
    pack_chunk,
)
from chunkstore.errors import CorruptObject, DeltasyncError, FormatUnsupported, LimitExceeded

NAME = "chunks/00000000000000000007/ab/0-0.chunk"
Header = dict[str, Any]


def valid_chunk() -> bytes:
    rng = np.random.default_rng(0)
    offsets = np.array([0, 1, 5, 300, 301, 4000, 4999, 5000], dtype=np.uint32)
    values = rng.integers(0, 1 << 16, 8).astype(np.uint16)
    whole = rng.integers(0, 1 << 32, 50).astype(np.uint32)
    sections = [
        Section(1, "BF16", 0, 6000, offsets, values),
        Section(2, "F32", 100, 150, None, whole),
        Section(3, "U8", 0, 300, None, np.zeros(300, np.uint8)),
        Section(
            4, "F16", 0, 6000, offsets, np.array([1, 2, 3, 4, 300, 0x8000, 0xFFFF, 0xFC00], np.uint16), True
        ),
    ]
    return pack_chunk([encode_section(s) for s in sections])


VALID = valid_chunk()


def parts(data: bytes) -> tuple[Header, bytes]:
    length = struct.unpack_from("<I", data, 12)[0]
    return msgpack.unpackb(data[16 : 16 + length]), data[16 + length :]


def build(header: object, body: bytes, *, version: int = 1) -> bytes:
    packed = msgpack.packb(header)
    assert isinstance(packed, bytes)
    return b"dsychunk" + struct.pack("<II", version, len(packed)) + packed + body


def decode_all(data: bytes) -> None:
    """Decode everything; what comes out must keep a section's rules."""
    reader = ChunkReader(data, name=NAME)
    for i, info in enumerate(reader.sections):
        section = reader.decode(i)
        section.check()
        assert len(section.values) == info.count


def read_all(data: bytes) -> None:
    """Decode, or meet a typed error that names the object; any other exception fails the test."""
    message = NAME
    try:
        decode_all(data)
    except (CorruptObject, FormatUnsupported, LimitExceeded) as error:
        message = error.message
    assert NAME in message


def refused(data: bytes, kind: type[DeltasyncError], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        decode_all(data)
    assert NAME in caught.value.message


def edited(change: Callable[[Header], object], body: bytes | None = None) -> bytes:
    header, old = parts(VALID)
    change(header)
    return build(header, old if body is None else body)


def test_the_unchanged_chunk_decodes() -> None:
    header, body = parts(VALID)
    assert build(header, body) == VALID
    encodings = [s.encoding for s in ChunkReader(VALID, name=NAME).sections]
    assert encodings == [Encoding.ABSOLUTE, Encoding.DENSE, Encoding.DENSE, Encoding.DELTA]
    decode_all(VALID)


@settings(deadline=None, max_examples=400)
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes(edits: list[tuple[int, int]]) -> None:
    data = bytearray(VALID)
    for at, value in edits:
        data[at] = value
    read_all(bytes(data))


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(VALID)), st.integers(0, len(VALID)), st.binary(max_size=40))
def test_cut_and_inserted_bytes(start: int, stop: int, extra: bytes) -> None:
    read_all(VALID[:start] + extra + VALID[stop:])


def test_every_truncation_is_refused() -> None:
    """FIELD_REPORTS: vmlx-swift#217."""
    for n in range(len(VALID)):
        refused(VALID[:n], CorruptObject, "chunk")


JUNK = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from([0, 1, WINDOW, WINDOW + 1, 1 << 20, 1 << 31, 1 << 32, 1 << 40, (1 << 64) - 1]),
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(["dense", "absolute", "delta", "sparse", "BF16", "F32", "U8"]),
    st.lists(st.integers(0, 1 << 20), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(0, 5), max_size=2),
)
KEYS = st.sampled_from(["tensor", "dtype", "start", "stop", "count", "encoding", "rice", "frames", "new"])


@settings(deadline=None, max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 3), KEYS, JUNK), min_size=1, max_size=3))
def test_edited_header_fields(edits: list[tuple[int, str, Any]]) -> None:
    def change(header: Header) -> None:
        for i, key, value in edits:
            header["sections"][i][key] = value

    read_all(edited(change))


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 3), st.integers(0, 6), st.integers(0, 1), JUNK)
def test_edited_frame_tables(i: int, frame: int, which: int, value: Any) -> None:
    def change(header: Header) -> None:
        table = header["sections"][i]["frames"]
        table[frame % len(table)][which] = value

    read_all(edited(change))


@settings(deadline=None, max_examples=100)
@given(
    st.recursive(JUNK, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=9)
)
def test_any_header(header: Any) -> None:
    read_all(build(header, b""))
    read_all(build({"sections": header}, b""))
    read_all(build({"sections": [header]}, b""))


def test_versions_and_encodings_of_the_future() -> None:
    header, body = parts(VALID)
    refused(build(header, body, version=2), FormatUnsupported, "format 2")
    refused(edited(lambda h: h["sections"][0].update(encoding="xor")), FormatUnsupported, "'xor'")
    refused(edited(lambda h: h["sections"][0].update(encoding="xor", key=[1])), FormatUnsupported, "'xor'")


def test_other_files_are_not_chunks() -> None:
    refused(b"", CorruptObject, "too few")
    refused(b"PK\3\4" * 10, CorruptObject, "magic")
    refused(bytes(100), CorruptObject, "magic")


def test_impossible_ranges_and_counts() -> None:
    def whole(**fields: object) -> bytes:
        return edited(lambda h: h["sections"][1].update(fields))

    refused(whole(start=WINDOW - 25, stop=WINDOW + 25), CorruptObject, "crosses a multiple")
    refused(whole(start=150, stop=100), CorruptObject, "empty or negative")
    refused(whole(count=49), CorruptObject, "stores 49 of 50")
    refused(whole(tensor=-1), CorruptObject, "not an unsigned integer")
    refused(whole(start=True), CorruptObject, "not an unsigned integer")
    refused(whole(dtype="Q4"), CorruptObject, "dtype 'Q4'")
    refused(edited(lambda h: h["sections"][0].update(count=0)), CorruptObject, "stores 0 of 6000")
    refused(
        edited(lambda h: h["sections"][0].update(dtype="F32")),
        CorruptObject,
        "dtype 'F32' in encoding absolute",
    )
    refused(VALID[:40], CorruptObject, "ends inside the header")


def test_unknown_keys_of_any_type() -> None:
    for key in ("new", b"new"):
        refused(edited(lambda h, k=key: h["sections"][0].update({k: 1})), CorruptObject, "has keys")  # type: ignore[misc]


def test_declared_sizes_over_a_limit() -> None:
    refused(VALID[:12] + struct.pack("<I", MAX_HEADER + 1) + VALID[16:], LimitExceeded, "header")
    refused(edited(lambda h: h["sections"][1].update(count=WINDOW + 1)), LimitExceeded, "'count'")
    refused(edited(lambda h: h["sections"][1].update(tensor=1 << 20)), LimitExceeded, "'tensor'")
    refused(edited(lambda h: h["sections"][1].update(stop=(1 << 40) + 1)), LimitExceeded, "'stop'")
    refused(edited(lambda h: h["sections"][0].update(rice=23)), LimitExceeded, "'rice'")
    refused(bytes(MAX_CHUNK + 1), LimitExceeded, "the limit is")
    refused(
        build({"sections": [{}] * (MAX_SECTIONS + 1)}, b""), CorruptObject, "not msgpack within its limits"
    )


def test_frames_that_overlap_leave_gaps_or_run_over() -> None:
    def move(by: int) -> Callable[[Header], object]:
        def change(header: Header) -> None:
            header["sections"][1]["frames"][0][0] += by

        return change

    refused(edited(move(-1)), CorruptObject, "expected at")
    refused(edited(move(1)), CorruptObject, "expected at")
    refused(VALID + b"x", CorruptObject, "1 bytes follow the last frame")
    refused(
        edited(lambda h: h["sections"][2]["frames"][0].__setitem__(1, 1 << 30)), CorruptObject, "expected at"
    )
    refused(edited(lambda h: h["sections"][2]["frames"].append([len(VALID), 0])), CorruptObject, "1 frames")


def test_sections_that_overlap() -> None:
    def change(header: Header) -> None:
        header["sections"][1].update(tensor=3, start=299, stop=349)

    refused(edited(change), CorruptObject, "of tensor 3 overlap")


def one_section(frame: bytes, *, count: int = 300) -> bytes:
    record = {"tensor": 0, "dtype": "U8", "start": 0, "stop": count, "count": count, "encoding": "dense"}
    return build({"sections": [record | {"frames": [[0, len(frame)]]}]}, frame)


def test_frames_whose_content_is_not_what_the_count_implies() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(300))
    decode_all(one_section(frame))
    refused(one_section(frame, count=299), CorruptObject, "declares 300 bytes, not 299")
    refused(
        one_section(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(300))),
        CorruptObject,
        "declares",
    )
    refused(one_section(frame + frame), CorruptObject, "does not decompress")
    refused(one_section(frame + b"\0"), CorruptObject, "does not decompress")
    refused(one_section(b""), CorruptObject, "0 bytes cannot hold 300")
    refused(one_section(b"\x50\x2a\x4d\x18" + struct.pack("<I", 300) + bytes(300)), CorruptObject, "a frame")


def rice_section(r: int, low: bytes, high: bytes, escapes: bytes, stop: int) -> bytes:
    return sparse_section(r, [low, high, escapes, bytes(len(high)), bytes(len(high))], len(high), stop)


def delta_section(signs: bytes, codes: bytes, escapes: list[bytes], count: int) -> bytes:
    """The first `count` elements of 100, with these streams of differences."""
    return sparse_section(0, [b"", bytes(count), b"", signs, codes, *escapes], count, 100, "delta")


def sparse_section(r: int, streams: list[bytes], count: int, stop: int, encoding: str = "absolute") -> bytes:
    frames = [zstandard.ZstdCompressor().compress(s) if s else b"" for s in streams]
    table, end = [], 0
    for frame in frames:
        table.append([end, len(frame)])
        end += len(frame)
    record = {
        "tensor": 0,
        "dtype": "BF16",
        "start": 0,
        "stop": stop,
        "count": count,
        "encoding": encoding,
    }
    return build({"sections": [record | {"rice": r, "frames": table}]}, b"".join(frames))


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 22),
    st.lists(st.sampled_from([0, 1, 7, 254, 255]), min_size=1, max_size=40),
    st.lists(
        st.sampled_from([0, 1, 1 << 21, (1 << 22) - 1, 1 << 31, (1 << 32) - 1]), min_size=40, max_size=40
    ),
    st.sampled_from([50, 1000, WINDOW]),
)
def test_gaps_never_lead_out_of_the_range(r: int, high: list[int], escapes: list[int], stop: int) -> None:
    """Sums and shifts of hostile gaps must not wrap around into something that looks valid."""
    extra = struct.pack(f"<{high.count(255)}I", *escapes[: high.count(255)])
    low = bytes(r // 8 * len(high) + (len(high) * (r % 8) + 7) // 8)
    data = rice_section(r, low, bytes(high), extra, stop)
    left, position = iter(escapes), -1
    for h in high:
        position += 1 + ((255 + next(left) if h == 255 else h) << r)
    if position < stop and len(high) <= stop:
        offsets = ChunkReader(data, name=NAME).decode(0).offsets
        assert offsets is not None
        assert int(offsets[-1]) == position
    else:
        refused(data, CorruptObject, "chunk")


def test_gaps_whose_sum_wraps_around_32_bits() -> None:
    gap = (254 << 14) + 1
    count = 1033
    assert count * gap % (1 << 32) < WINDOW < gap * count
    low = bytes(count + (count * 6 + 7) // 8)
    refused(rice_section(14, low, bytes([254] * count), b"", WINDOW), CorruptObject, "beyond")


def test_a_gap_that_is_shifted_out_of_32_bits() -> None:
    extra = struct.pack("<I", 4096 - 255)
    refused(rice_section(20, bytes(3), b"\xff", extra, WINDOW), CorruptObject, "beyond")


def test_an_escape_that_wraps_around_32_bits() -> None:
    extra = struct.pack("<I", (1 << 32) - 1)
    refused(rice_section(0, b"", b"\xff", extra, 1000), CorruptObject, "beyond")


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 0xFFFF)), min_size=1, max_size=40),
    st.integers(0, 0xFF),
)
def test_differences_of_any_streams(items: list[tuple[bool, int, int]], unused: int) -> None:
    """Whatever bits arrive: a difference that is not 0, or a refusal. Unused bits do not matter."""
    count = len(items)
    signs = sum(negative << i for i, (negative, _, _) in enumerate(items)) | unused << count
    codes = sum(code << 2 * i for i, (_, code, _) in enumerate(items)) | unused << 2 * count
    sign_bytes, code_bytes = (count + 7) // 8, (2 * count + 7) // 8
    escapes = [escape for _, code, escape in items if code == 3]
    data = delta_section(
        (signs & (1 << 8 * sign_bytes) - 1).to_bytes(sign_bytes, "little"),
        (codes & (1 << 8 * code_bytes) - 1).to_bytes(code_bytes, "little"),
        [bytes(e & 255 for e in escapes), bytes(e >> 8 for e in escapes)],
        count,
    )
    if any(escape > 32764 for escape in escapes):
        refused(data, CorruptObject, "beyond 16 bits")
        return
    section = ChunkReader(data, name=NAME).decode(0)
    assert section.relative
    expected = [
        (-1 if negative else 1) * (code + 1 + (escape if code == 3 else 0))
        for negative, code, escape in items
    ]
    assert section.values.tolist() == [d % (1 << 16) for d in expected]
    assert 0 not in section.values


def test_streams_of_differences_have_the_sizes_that_follow() -> None:
    decode_all(delta_section(b"\0", b"\x0f\0", [b"\0\0", b"\0\0"], 8))
    refused(delta_section(b"\0\0", b"\0\0", [b"", b""], 8), CorruptObject, "2 bytes, not 1")
    refused(delta_section(b"\0", b"\0", [b"", b""], 8), CorruptObject, "1 bytes, not 2")
    refused(delta_section(b"\0", b"\x0f\0", [b"\0", b"\0"], 8), CorruptObject, "1 bytes, not 2")
    refused(delta_section(b"\0", b"\0\0", [b"\0", b""], 8), CorruptObject, "cannot hold 0")


def test_differences_are_of_sixteen_bits() -> None:
    def change(header: Header) -> None:
        header["sections"][3]["dtype"] = "F32"

    refused(edited(change), CorruptObject, "dtype 'F32' in encoding delta")


def test_a_bomb_allocates_nothing() -> None:
    """One frame that would unpack to 1 GiB, and one that claims 2⁶² bytes."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26)) * 16
    claim = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 62) + bytes(8)
    tracemalloc.start()
    refused(one_section(bomb), CorruptObject, "declares")
    refused(one_section(claim), CorruptObject, "declares")
    refused(build({"sections": [[[]] * 1000] * 1000}, b""), CorruptObject, "list of maps")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 96 << 20
