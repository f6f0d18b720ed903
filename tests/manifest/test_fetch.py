"""Fetching: nothing reaches a decoder that is not, to the byte and the section, what its manifest promised."""

from collections.abc import Callable
from typing import Any

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkstore import difference
from chunkstore.codec import Section, encode_section, pack_chunk
from chunkstore.errors import CorruptObject, DeltasyncError, ObjectMissing
from chunkstore.memory import MemoryStore
from manifest.catalog import Catalog, TensorSpec
from manifest.errors import ManifestInvalid
from manifest.fetch import fetch_chunk
from manifest.layout import check_layout
from manifest.schema import ChunkRef, Manifest
from manifest.sections import SectionRef, Sections
from tests.support.manifests import altered
from tests.support.streams import StreamBuilder, random_weights

SHAPES = {"a": (4, 5), "b": (), "c": (0, 3), "d": (7,), "e": (3, 3)}
DTYPES = {"d": "F32", "e": "F16"}


def build(per_chunk: int = 3) -> StreamBuilder:
    stream = StreamBuilder(MemoryStore("s"), random_weights(SHAPES, DTYPES), per_chunk=per_chunk)
    stream.train(0.2)
    return stream


def test_chunks_come_back_as_they_were_written() -> None:
    stream = build()
    before, relative = None, 0
    for manifest, weights in zip(stream.manifests, stream.weights, strict=True):
        check_layout(manifest, stream.catalog)
        for ref in manifest.chunks:
            reader = fetch_chunk(stream.store, ref, stream.catalog)
            for i in range(len(reader.sections)):
                section = reader.decode(i)
                flat = weights[stream.catalog.tensors[section.tensor].name].bits.ravel()[
                    section.start : section.stop
                ]
                expected = flat if section.offsets is None else flat[section.offsets]
                values = section.values
                if section.relative:
                    assert before is not None
                    base = before[stream.catalog.tensors[section.tensor].name].bits.ravel()[section.start :]
                    values = difference.add(base[section.offsets], values)
                    relative += 1
                np.testing.assert_array_equal(values, expected)
        before = weights
    assert relative


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1], "promises"),
        (lambda data: data + b"\0", "larger than"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "hash"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 128]), "hash"),
        (lambda data: b"", "promises"),
    ],
)
def test_a_damaged_chunk_is_named(damage: Callable[[bytes], bytes], why: str) -> None:
    """FIELD_REPORTS: vmlx-swift#217, airflow#60223. Length and hash before use."""
    stream = build()
    ref = stream.manifests[0].chunks[0]
    stream.store.put(ref.key, damage(stream.store.get(ref.key, limit=ref.nbytes)))
    with pytest.raises(CorruptObject, match=f"{ref.key} .*{why}"):
        fetch_chunk(stream.store, ref, stream.catalog)
    stream.store.delete(ref.key)
    with pytest.raises(ObjectMissing, match=ref.key):
        fetch_chunk(stream.store, ref, stream.catalog)


def put_chunk(store: MemoryStore, sections: list[Section], refs: list[SectionRef]) -> ChunkRef:
    data = pack_chunk([encode_section(s) for s in sections])
    store.put("chunks/x", data)
    return ChunkRef(
        key="chunks/x", nbytes=len(data), hash=blake3.blake3(data).digest(), sections=Sections.of(refs)
    )


CATALOG = Catalog.of([TensorSpec("w", "BF16", (8,)), TensorSpec("x", "F32", (4,))])
WHOLE = Section(0, "BF16", 0, 8, None, np.arange(8, dtype=np.uint16))
FEW = Section(0, "BF16", 0, 8, np.array([1, 5], np.uint32), np.array([7, 7], np.uint16))


@pytest.mark.parametrize(
    ("section", "promised", "why"),
    [
        (WHOLE, {"tensor": 1}, "disagree on section 0"),
        (WHOLE, {"stop": 7, "changed": 7}, "disagree on section 0"),
        (WHOLE, {"whole": False}, "disagree on section 0"),
        (FEW, {"whole": False, "changed": 3}, "disagree on section 0"),
        (Section(0, "F16", 0, 8, None, WHOLE.values), {}, "'w' is BF16, stored as F16"),
        (
            Section(0, "BF16", 0, 9, None, np.arange(9, dtype=np.uint16)),
            {"stop": 9, "changed": 9},
            "8 elements",
        ),
        (Section(2, "BF16", 0, 8, None, WHOLE.values), {"tensor": 2}, "no tensor 2"),
    ],
)
def test_a_chunk_that_is_not_what_its_manifest_says(
    section: Section, promised: dict[str, Any], why: str
) -> None:
    """FIELD_REPORTS: miles#2692. Wrong tensor, dtype or range is seen before anything is decoded."""
    store = MemoryStore()
    fields: dict[str, Any] = {"tensor": 0, "start": 0, "stop": 8, "whole": True, "changed": 8}
    ref = SectionRef.model_validate(fields | promised)
    with pytest.raises(CorruptObject, match=why):
        fetch_chunk(store, put_chunk(store, [section], [ref]), CATALOG)
    with pytest.raises(CorruptObject, match="manifest names 2"):
        fetch_chunk(store, put_chunk(store, [section], [ref, ref]), CATALOG)


def without_section(manifest: Manifest, tensor: int) -> list[ChunkRef]:
    chunks = [(c, [s for s in c.sections if s.tensor != tensor]) for c in manifest.chunks]
    return [with_sections(c, kept) for c, kept in chunks if kept]


def with_sections(chunk: ChunkRef, sections: list[SectionRef]) -> ChunkRef:
    return chunk.model_copy(update={"sections": Sections.of(sections)})


def test_an_anchor_must_hold_every_tensor_whole() -> None:
    """FIELD_REPORTS: trl#5932. A full version that lacks a tensor, or holds one in part, is refused by name."""
    stream = build()
    anchor = stream.manifests[0]
    with pytest.raises(ManifestInvalid, match="'d' has 7 elements, the anchor holds 0"):
        check_layout(altered(anchor, chunks=without_section(anchor, stream.catalog.ids["d"])), stream.catalog)
    with pytest.raises(ManifestInvalid, match="'a' has 20 elements, the anchor holds 5"):
        check_layout(altered(stream.manifests[1], kind="anchor"), stream.catalog)


def test_a_manifest_must_fit_its_catalog() -> None:
    stream = build()
    anchor = stream.manifests[0]
    other = Catalog.of([*stream.catalog.tensors, TensorSpec("z", "BF16", (2,))])
    first = anchor.chunks[0]
    far = first.sections[0].model_copy(update={"tensor": 5})
    wide = first.sections[0].model_copy(update={"stop": 21, "changed": 21})
    sparse = SectionRef(tensor=stream.catalog.ids["d"], start=0, stop=7, whole=False, changed=2)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"catalog": other.hash}, "catalog"),
        ({"digests": anchor.digests[8:]}, "4 digests, its catalog 5 tensors"),
        ({"digests": anchor.digests[::-1]}, "root digest"),
        ({"root": bytes(32)}, "root digest"),
        ({"chunks": [*anchor.chunks, first]}, "'a' has two whole sections over element 0"),
        ({"chunks": [with_sections(first, [far])]}, "tensor 5"),
        (
            {"chunks": [with_sections(first, [wide])]},
            "'a' has 20 elements, a section goes to 21",
        ),
        (
            {"chunks": [with_sections(first, [sparse])]},
            "'d' is F32, which is only sent whole",
        ),
    ]
    for changes, why in cases:
        with pytest.raises(ManifestInvalid, match=why):
            check_layout(altered(anchor, **changes), stream.catalog)


def test_writers_that_interleave_store_each_element_once() -> None:
    """Ranges may overlap, as those of two halves of a matrix's columns do; what is whole is nobody else's."""
    stream = build()
    manifest, first = stream.manifests[0], stream.manifests[0].chunks[0]
    others = [s for c in manifest.chunks for s in c.sections if s.tensor != 0]

    def storing(*sections: tuple[int, int, bool, int]) -> Manifest:
        own = [
            SectionRef(tensor=0, start=start, stop=stop, whole=whole, changed=changed)
            for start, stop, whole, changed in sections
        ]
        return altered(manifest, chunks=[with_sections(first, [*own, *others])])

    assert stream.catalog.tensors[0].numel == 20
    check_layout(storing((0, 18, False, 10), (2, 20, False, 10)), stream.catalog)
    check_layout(storing((0, 20, False, 12), (4, 12, True, 8)), stream.catalog)
    for sections, why in (
        ([(0, 20, False, 12), (4, 12, True, 8), (11, 12, True, 1)], "two whole sections over element 11"),
        ([(0, 18, False, 11), (2, 20, False, 10)], "'a' has 20 elements, its sections store 21"),
        ([(0, 18, False, 9), (2, 20, False, 10)], "'a' has 20 elements, the anchor holds 19"),
    ):
        with pytest.raises(ManifestInvalid, match=why):
            check_layout(storing(*sections), stream.catalog)


def test_only_named_chunks_count() -> None:
    """FIELD_REPORTS: prime-rl#3316. Leftovers of another try lie beside a version's chunks and change nothing."""
    stream = build()
    left_over = stream.make(random_weights(SHAPES, DTYPES, seed=9), None)  # crashed before its commit
    committed = stream.train(0.2)
    assert left_over.version == committed.version
    assert not {c.key for c in left_over.chunks} & {c.key for c in committed.chunks}
    with pytest.raises(ValueError, match="is not under"):
        Manifest(**{**committed.model_dump(), "chunks": left_over.chunks})


@given(st.data())
def test_hostile_catalogs_raise_only_typed_errors(data: st.DataObject) -> None:
    raw = bytearray(CATALOG.data)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        parsed = Catalog.from_bytes(bytes(raw))
    except DeltasyncError:
        return
    assert parsed.data == bytes(raw)
