"""docs/FORMAT.md, the golden files and the code say the same: tables and vectors are read out of the document."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import blake3
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from chunkstore import difference, digest, digest_torch
from chunkstore.codec import ChunkReader, Encoding, Section, encode_section, pack_chunk
from chunkstore.dtypes import SPARSE, WIDTH, bits_dtype
from chunkstore.rice import decode_offsets
from manifest.catalog import Catalog, TensorSpec, root_digest
from manifest.parts import Call, CallKind, Part, ShardRef, layout_hash
from manifest.schema import ChunkRef, Manifest, Stats
from manifest.sections import SectionRef, Sections
from manifest.signing import Signer
from subscriber.status import SubscriberStatus

GOLDEN = Path(__file__).parent / "format-1"
FORMAT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()
Row = dict[str, str]


def tables(heading: str) -> list[list[Row]]:
    """The tables below `heading`, up to the next one; a row is its cells by column, code marks removed."""
    body = re.split(r"^#+ ", FORMAT.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"(?:^\|.*\n)+", body, flags=re.MULTILINE)
    out = []
    for text in found:
        head, _, *rows = [[c.strip() for c in line.strip("|\n").split("|")] for line in text.splitlines()]
        out.append([dict(zip(head, row, strict=True)) for row in rows])
    return out


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def code(cell: str) -> str:
    (only,) = codes(cell)
    return only


def dump(name: str) -> bytes:
    """The hexadecimal block called `name`."""
    match = re.search(rf"```hex {re.escape(name)}\n(.*?)```", FORMAT, flags=re.DOTALL)
    assert match
    return bytes.fromhex(match[1])


def words(cells: list[str], dtype: str) -> np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]:
    return np.array([int(x, 16) for x in cells], dtype=dtype)


# Digest


@pytest.mark.parametrize("row", tables("Coefficients")[0], ids=lambda r: r["name"])
def test_coefficients(row: Row) -> None:
    name = code(row["name"])
    c = digest.Coefficients.of(name)
    a = c.a_run(0, 2)
    seed_c = xxhash.xxh3_64_intdigest(b"C" + name.encode())
    got = [c.seed_a, a[0], a[1], seed_c, c.c[0], c.c[1], c.c[4095]]
    assert [f"{int(x):016x}" for x in got] == [code(x) for x in list(row.values())[1:]]


@pytest.mark.parametrize("row", tables("Digests of runs")[0], ids=lambda r: r["elements"])
def test_digests_of_runs(row: Row) -> None:
    width, start = int(row["bytes per element"]), int(row["first index"])
    bits = words(codes(row["elements"]), f"<u{width}")
    expected = int(code(row["digest"]), 16)
    at = np.arange(start, start + len(bits))
    signed = torch.from_numpy(bits.view(f"<i{width}"))
    assert digest.digest("w", bits, start) == digest.digest_at("w", at, bits) == expected
    assert digest_torch.digest("w", signed, start) == expected
    assert digest_torch.digest_at("w", torch.from_numpy(at), signed) == expected


def test_digests_of_a_matrix_and_its_transpose() -> None:
    i = np.arange(4096, dtype=np.uint64)
    matrix = ((40503 * i[:, None] + 9973 * i) % 65536).astype(np.uint16)
    there, back = (int(code(row["digest"]), 16) for row in tables("Digests of a matrix and its transpose")[0])
    assert (digest.digest("w", matrix), digest.digest("w", matrix.T)) == (there, back)
    assert there != back


# Catalog and manifest


def test_catalog_and_root() -> None:
    tensors = [
        TensorSpec("model.embed_tokens.weight", "BF16", (4, 2)),
        TensorSpec("a.bias", "F32", ()),
    ]
    catalog = Catalog.of(tensors, {"lm_head.weight": "model.embed_tokens.weight"})
    of_catalog, of_root = tables("Catalog and root")[0]
    assert catalog.data == dump("catalog")
    assert catalog.hash.hex() == code(of_catalog["hash"])
    digests = words(codes(of_root["of"]), "<u8").astype(np.uint64)
    assert root_digest(catalog, digests).hex() == code(of_root["hash"])


def test_every_field_is_documented_in_wire_order() -> None:
    models: list[type[BaseModel]] = [Manifest, ChunkRef, SectionRef, Stats]
    for model, table in zip(models, tables("Manifest"), strict=True):
        assert [code(row["field"]) for row in table] == list(model.model_fields)


def test_every_field_of_calls_and_parts_is_documented_in_wire_order() -> None:
    fields, kinds = tables("Call")
    assert [code(row["field"]) for row in fields] == list(Call.model_fields)
    assert {kind for row in kinds for kind in codes(row["kind"])} == set(get_args(CallKind))
    models: list[type[BaseModel]] = [Part, ShardRef]
    for model, table in zip(models, tables("Part"), strict=True):
        assert [code(row["field"]) for row in table] == list(model.model_fields)


def run_of(first: int, length: int) -> bytes:
    return bytes(range(first, first + length))


def test_calls_and_parts() -> None:
    layout = layout_hash(run_of(0, 32), 2, "run-1")
    assert [code(row["hash"]) for row in tables("Calls and parts")[0]] == [layout.hex()]
    common: dict[str, Any] = {
        "stream": run_of(0, 16), "version": 7, "attempt": run_of(16, 16), "base": run_of(32, 32), "layout": layout
    }  # fmt: skip
    call = Call(**common, number=3, kind="version", train_step=40, whole=[], reason="")
    why = "writer 1 is missing"
    over = Call(**common, number=4, kind="abandoned", train_step=None, whole=[0, 2], reason=why)
    section = SectionRef(tensor=0, start=5, stop=9, whole=False, changed=2)
    key = f"chunks/{7:020}/{run_of(16, 16).hex()}/1-0.chunk"
    part = Part(
        **common,
        writer=1,
        train_step=40,
        shards=[
            ShardRef(tensor=0, start=5, size=[4], stride=[1], base=1 << 63, digest=0xE54892EDFF528CD3),
            ShardRef(tensor=2, start=8, size=[2, 3], stride=[12, 1], base=7, digest=7),
        ],
        chunks=[ChunkRef(key=key, nbytes=100, hash=run_of(64, 32), sections=Sections.of([section]))],
        stats=Stats(elements=10, changed=2),
    )
    for name, record in (("call", call), ("call abandoned", over), ("part", part)):
        assert record.data == dump(name)
        assert type(record).from_bytes(dump(name), name=name) == record


def test_signatures() -> None:
    private, private_text, public, signature = (code(row["bytes or text"]) for row in tables("Signatures")[0])
    stored = dump("signed.manifest")
    assert (GOLDEN / "signed.manifest").read_bytes() == stored
    manifest = Manifest.from_bytes(stored, name="signed.manifest")
    signer = Signer.parse(private_text)
    assert str(signer.public) == public
    assert signer.sign(manifest.model_copy(update={"signature": None})).data == stored
    signer.trust.check_manifest(manifest, run_of(0, 16), "signed.manifest")
    # Once more by the document alone.
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private))
    message = b"deltasync manifest v1\0" + stored[:-98]
    assert stored[-98:] == b"\xc4\x60" + bytes.fromhex(signature)
    assert signature == (key.public_key().public_bytes_raw() + key.sign(message)).hex()


def test_documented_status_fields_exist() -> None:
    documented = {code(row["field"]) for row in tables("Subscriber status")[0]}
    assert documented <= set(SubscriberStatus.model_fields)


def test_dtypes() -> None:
    rows = tables("Catalog")[1]
    assert {code(r["dtype"]): int(r["bytes per element"]) for r in rows} == WIDTH
    sparse = "changes may be stored element by element"
    assert {code(r["dtype"]) for r in rows if r[sparse] == "yes"} == SPARSE


def test_limits() -> None:
    for row in tables("Limits")[0]:
        module, _, name = code(row["in the code"]).rpartition(".")
        assert getattr(import_module(module), name) == int(row["value"]), name


# Chunks

FILES = sorted({code(row["file"]) for row in tables("Chunks")[0]})


def described(file: str) -> list[Section]:
    """The sections that the document says a golden file holds."""
    out = []
    for row in tables("Chunks")[0]:
        if code(row["file"]) == file:
            dtype, offsets = code(row["dtype"]), row["offsets"]
            where = None if offsets == "all" else np.array(offsets.split(), dtype=np.uint32)
            values = words(codes(row["values"]), bits_dtype(dtype).str)
            start, stop = int(row["start"]), int(row["stop"])
            relative = file.startswith("delta")
            out.append(Section(int(row["tensor"]), dtype, start, stop, where, values, relative))
    return out


def same(a: Section, b: Section) -> bool:
    fields = ("tensor", "dtype", "start", "stop", "whole", "relative")
    places = all(getattr(a, field) == getattr(b, field) for field in fields)
    if a.offsets is not None and b.offsets is not None:
        places = places and np.array_equal(a.offsets, b.offsets)
    return places and np.array_equal(a.values, b.values)


@pytest.mark.parametrize("file", FILES)
def test_golden_chunks(file: str) -> None:
    """Chunks of every released format stay readable; what is written today may be compressed otherwise."""
    data = (GOLDEN / file).read_bytes()
    assert data == dump(file)
    expected = described(file)
    rewritten = pack_chunk([encode_section(s) for s in expected])
    for chunk in (data, rewritten):
        reader = ChunkReader(chunk, name=file)
        decoded = [reader.decode(i) for i in range(len(reader.sections))]
        assert len(decoded) == len(expected)
        assert all(same(a, b) for a, b in zip(decoded, expected, strict=True))


def test_no_golden_file_is_forgotten() -> None:
    assert sorted(p.name for p in GOLDEN.iterdir()) == [*FILES, "signed.manifest"]
    seen = {s.encoding for f in FILES for s in ChunkReader((GOLDEN / f).read_bytes(), name=f).sections}
    assert seen == set(Encoding)


@pytest.mark.parametrize("row", tables("Chunks")[1], ids=lambda r: r["file"])
def test_streams_of_the_gaps(row: Row) -> None:
    file = code(row["file"])
    (spec,) = [r for r in tables("Chunks")[0] if r["file"] == row["file"]]
    streams = [bytes.fromhex("".join(codes(row[f"`{c}`"]))) for c in ("low", "high", "escapes")]
    offsets = np.cumsum(np.array(row["gaps"].split(), dtype=np.uint32) + 1) - 1
    assert offsets.tolist() == [int(x) for x in spec["offsets"].split()]
    low, high, escapes = streams
    np.testing.assert_array_equal(decode_offsets(int(spec["r"]), low, high, escapes, 1 << 22), offsets)
    data = (GOLDEN / file).read_bytes()
    (info,) = ChunkReader(data, name=file).sections
    assert info.rice == int(spec["r"])
    stored = [zstandard.ZstdDecompressor().decompress(f) for f in frames(data)]
    expected = [stream for stream in streams if stream]
    assert stored[: len(expected)] == expected


@pytest.mark.parametrize("row", tables("Chunks")[2], ids=lambda r: r["file"])
def test_streams_of_the_differences(row: Row) -> None:
    file = code(row["file"])
    expected = np.array([number(x) for x in row["differences"].split()], np.int64).astype(np.uint16)
    split = difference.encode_differences(expected)
    large = [bytes.fromhex(x) for x in codes(row["`large`"])] or [b"", b""]
    assert [split.signs.hex(), split.codes.hex()] == [code(row["`signs`"]), code(row["`codes`"])]
    assert [
        (split.escapes & 255).astype("u1").tobytes(),
        (split.escapes >> 8).astype("u1").tobytes(),
    ] == large
    stored = [zstandard.ZstdDecompressor().decompress(f) for f in frames((GOLDEN / file).read_bytes())]
    streams = [split.signs, split.codes, *(plane for plane in large if plane)]
    assert stored[-len(streams) :] == streams
    (section,) = described(file)
    np.testing.assert_array_equal(section.values, expected)


@pytest.mark.parametrize("row", tables("Chunks")[3], ids=lambda r: f"{r['old']} {r['new']}")
def test_differences_between_patterns(row: Row) -> None:
    old, new = (words(codes(row[column]), "<u2") for column in ("old", "new"))
    expected = number(row["difference"]) % (1 << 16)
    assert difference.difference(new, old).tolist() == [expected]
    assert difference.add(old, np.array([expected], np.uint16)).tolist() == new.tolist()


def number(text: str) -> int:
    """A decimal number whose minus is the typographic one."""
    return int(text.replace("−", "-"))


def frames(data: bytes) -> list[bytes]:
    """The zstd frames of a chunk, found by their magic alone."""
    magic = b"\x28\xb5\x2f\xfd"
    return [magic + rest for rest in data.split(magic)[1:]]


def test_golden_files_are_what_the_document_hashes() -> None:
    """A golden file that was regenerated shows here, whatever the document says by then."""
    hashes = {p.name: blake3.blake3(p.read_bytes()).hexdigest()[:16] for p in GOLDEN.iterdir()}
    assert hashes == {
        "absolute.chunk": "06fe3635cdc5039e",
        "absolute-escapes.chunk": "69bbc3090d07abf9",
        "absolute-planes.chunk": "5e92db448f3857dc",
        "delta.chunk": "db0440116b0dd4a2",
        "delta-escapes.chunk": "9d6cfdb5de0aa22d",
        "dense.chunk": "913ae0f2621ca993",
        "signed.manifest": "b40c68be42f9640d",
    }


# Rounding


@given(st.lists(st.integers(0, (1 << 32) - 1).filter(lambda u: u & 0x7FFFFFFF <= 0x7F800000), min_size=1))
def test_rounding_to_bf16_is_the_documented_formula(patterns: list[int]) -> None:
    values = torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32))
    rounded = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert rounded.tolist() == [(u + 0x7FFF + (u >> 16 & 1)) >> 16 for u in patterns]


def test_a_nan_becomes_one_of_the_documented_nans() -> None:
    documented = {0xFFFF, 0x7FC0}
    assert all(f"`{x:04x}`" in FORMAT for x in documented)
    values = torch.full((1000,), float("nan"))
    for cast in (values.to(torch.bfloat16), values[::3].to(torch.bfloat16), values[0].to(torch.bfloat16)):
        bits = cast.contiguous().reshape(-1).view(torch.int16).numpy().view(np.uint16)
        assert len(set(bits.tolist())) == 1
        assert set(bits.tolist()) <= documented
