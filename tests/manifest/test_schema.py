"""The manifest, the catalog and the keys: what is written comes back, what breaks a rule is refused by name."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chunkstore.codec import WINDOW
from chunkstore.dtypes import WIDTH
from chunkstore.errors import FormatUnsupported
from manifest.catalog import MAX_TENSORS, Catalog, TensorSpec, root_digest
from manifest.errors import ManifestInvalid
from manifest.keys import (
    alternate_key,
    chunk_key,
    manifest_key,
    parse_alternate_key,
    parse_version_key,
    version_name,
)
from manifest.schema import Manifest
from manifest.sections import SectionRef, Sections
from tests.support.manifests import altered, make_chain, make_manifest

SOUND = {"tensor": 0, "start": 0, "stop": 8, "whole": False, "changed": 3}


def test_manifests_come_back_equal() -> None:
    for manifest in make_chain(3):
        back = Manifest.from_bytes(manifest.data, name="x")
        assert (back, back.data, back.hash) == (manifest, manifest.data, manifest.hash)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stop": 0, "changed": 1}, "impossible"),
        ({"changed": 9}, "impossible"),
        ({"changed": 0}, "greater than or equal to 1"),
        ({"whole": True}, "stores every element"),
        ({"start": WINDOW - 1, "stop": WINDOW + 1, "changed": 1}, "crosses a multiple"),
        ({"tensor": -1}, "greater than or equal to 0"),
        ({"stop": 1 << 63}, "less than"),
        ({"more": 1}, "Extra inputs"),
    ],
)
def test_sections_that_cannot_be(changes: dict[str, Any], why: str) -> None:
    assert SectionRef.model_validate(SOUND).changed == 3
    assert SectionRef(tensor=0, start=WINDOW, stop=2 * WINDOW, whole=True, changed=WINDOW).whole
    with pytest.raises(ValidationError, match=why):
        SectionRef.model_validate(SOUND | changes)
    with pytest.raises(ValueError, match=why):
        Sections.of([SOUND, SOUND | changes])


EDGES = st.sampled_from(
    [-1, 0, 1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, MAX_TENSORS, 1 << 63, 1 << 64]
)
FIELD = EDGES | st.booleans() | st.sampled_from([1.0, "1", None])
ANY_SECTION = (
    st.fixed_dictionaries(
        {"tensor": EDGES, "start": EDGES, "stop": EDGES, "whole": st.booleans(), "changed": EDGES}
    )
    | st.fixed_dictionaries(
        {"tensor": FIELD, "start": FIELD, "stop": FIELD, "whole": FIELD, "changed": FIELD}
    )
    | st.dictionaries(st.sampled_from([*SOUND, "more"]), EDGES)
    | st.just(dict(reversed(SOUND.items())))
    | st.none()
)


@given(st.lists(st.just(SOUND) | ANY_SECTION, min_size=1, max_size=4))
def test_many_sections_are_checked_as_each_of_them_is(sections: list[Any]) -> None:
    """All at once, which is fast, and one by one, which defines it, accept the same."""
    try:
        each = [SectionRef.model_validate(section) for section in sections]
    except ValidationError:
        with pytest.raises(ValueError, match="section "):
            Sections.of(sections)
        return
    together = Sections.of(sections)
    assert list(together) == each
    assert [together[i] for i in range(len(together))] == each
    assert together == Sections.of(each)
    assert together.as_maps() == [section.model_dump() for section in each]
    assert all(type(value) is type(SOUND[name]) for s in together for name, value in dict(s).items())


@pytest.mark.parametrize("nothing", [[], (), {}, None, "x"])
def test_a_chunk_has_sections(nothing: object) -> None:
    with pytest.raises(ValueError, match="at least one section"):
        Sections.of(nothing)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"digests": bytes(9)}, "whole 64-bit"),
        ({"kind": "anchor"}, "anchor has no base"),
        ({"base_version": None}, "names its base"),
        ({"base_root": None}, "names its base"),
        ({"base_version": 1}, "not older"),
        ({"parent_hash": None}, "only version 0"),
        ({"chunks": []}, "changes the root"),
        ({"created_at": float("nan")}, "finite"),
        ({"stream": bytes(15)}, "16 bytes"),
        ({"kind": "xor"}, "anchor"),
    ],
)
def test_manifests_that_contradict_themselves(changes: dict[str, Any], why: str) -> None:
    manifest = make_chain(2)[1]
    with pytest.raises(ManifestInvalid, match=why):
        Manifest.from_bytes(altered(manifest, **changes).data, name="x")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("../../etc/passwd", "not allowed"),
        ("chunks/../x", "not allowed"),
        ("versions/" + version_name(1), "outside chunks/"),
        (chunk_key(0, bytes(16), 0, 0), "is not under"),
    ],
)
def test_chunk_keys_stay_inside_their_attempt(key: str, why: str) -> None:
    manifest = make_chain(2)[1]
    (chunk,) = manifest.chunks
    with pytest.raises(ManifestInvalid, match=why):
        Manifest.from_bytes(altered(manifest, chunks=[chunk.model_copy(update={"key": key})]).data, name="x")
    with pytest.raises(ManifestInvalid, match="named twice"):
        Manifest.from_bytes(altered(manifest, chunks=[chunk, chunk]).data, name="x")


def test_only_the_canonical_form_is_read() -> None:
    """Equal manifests have equal bytes, which is what settles an ambiguous commit."""
    manifest = make_manifest(0)
    fields = manifest.model_dump()
    for other in (dict(reversed(fields.items())), fields | {"created_at": 1}):
        with pytest.raises(ManifestInvalid, match="canonical"):
            Manifest.from_bytes(msgpack.packb(other), name="x")
    with pytest.raises(FormatUnsupported, match="format 2"):
        Manifest.from_bytes(msgpack.packb(fields | {"format": 2}), name="x")


NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
SPECS = st.builds(
    TensorSpec, NAMES, st.sampled_from(sorted(WIDTH)), st.lists(st.integers(0, 9), max_size=4).map(tuple)
)


@given(st.lists(SPECS, max_size=8, unique_by=lambda s: s.name), st.randoms())
def test_catalogs_come_back_equal_and_sorted(specs: list[TensorSpec], random: Any) -> None:
    names = {spec.name for spec in specs}
    aliases = {alias: spec.name for spec in specs[:2] if (alias := spec.name + "~tied") not in names}
    catalog = Catalog.of(specs, aliases)
    back = Catalog.from_bytes(catalog.data)
    assert (back, back.hash) == (catalog, catalog.hash)
    random.shuffle(specs)
    assert Catalog.of(specs, aliases).data == catalog.data
    assert [catalog.ids[s.name] for s in catalog.tensors] == list(range(len(specs)))


@pytest.mark.parametrize(
    ("specs", "aliases", "why"),
    [
        ([("w", "BF16", ()), ("w", "F32", ())], {}, "'w' appears twice"),
        ([("w", "Q4_0", ())], {}, "unknown dtype 'Q4_0'"),
        ([("a b", "BF16", ())], {}, "'a b' is not printable"),
        ([("w", "BF16", (1 << 20, 1 << 20))], {}, "'w' is too large"),
        ([("w", "BF16", ())], {"x": "y"}, "alias 'x' of 'y'"),
        ([("w", "BF16", ())], {"w": "w"}, "alias 'w' is also a tensor"),
        ([("w", "BF16", ())], {"é": "w"}, "is not a name"),
    ],
)
def test_catalogs_that_cannot_be(
    specs: list[tuple[str, str, tuple[int, ...]]], aliases: dict[str, str], why: str
) -> None:
    with pytest.raises(ManifestInvalid, match=why):
        Catalog.of([TensorSpec(*spec) for spec in specs], aliases)
    wire = {
        "format": 1,
        "tensors": [{"name": n, "dtype": d, "shape": list(s)} for n, d, s in specs],
        "aliases": aliases,
    }
    with pytest.raises(ManifestInvalid, match=why):
        Catalog.from_bytes(msgpack.packb(wire))


def test_catalogs_of_another_order_or_format() -> None:
    wire = {
        "format": 1,
        "tensors": [{"name": n, "dtype": "BF16", "shape": []} for n in "ba"],
        "aliases": {},
    }
    with pytest.raises(ManifestInvalid, match="canonical"):
        Catalog.from_bytes(msgpack.packb(wire))
    with pytest.raises(FormatUnsupported, match="format 3"):
        Catalog.from_bytes(msgpack.packb(wire | {"format": 3}))


def test_the_root_digest_depends_on_name_dtype_shape_and_digest() -> None:
    base = TensorSpec("w", "BF16", (2, 3))
    cases = [
        (base, 1),
        (base, 2),
        (TensorSpec("v", "BF16", (2, 3)), 1),
        (TensorSpec("w", "F16", (2, 3)), 1),
        (TensorSpec("w", "BF16", (3, 2)), 1),
    ]
    roots = {root_digest(Catalog.of([spec]), np.array([value], np.uint64)) for spec, value in cases}
    assert len(roots) == len(cases)
    assert (
        root_digest(Catalog.of([base], {"x": "w"}), np.array([1], np.uint64)) in roots
    )  # an alias is a name only


@given(st.integers(0, 10**20 - 1), st.integers(0, 10**20 - 1))
def test_keys_sort_as_versions_and_parse_back(a: int, b: int) -> None:
    assert (manifest_key(a) < manifest_key(b)) == (a < b)
    assert parse_version_key(manifest_key(a)) == parse_alternate_key(alternate_key(a)) == a


@pytest.mark.parametrize(
    "key", ["", "versions/", "versions/1", "versions/" + "١" * 20, "alternates/" + "0" * 20]
)
def test_other_keys_do_not_parse(key: str) -> None:
    assert parse_version_key(key) is None
    assert parse_alternate_key(key) is None
    with pytest.raises(ValueError, match="outside"):
        version_name(10**20)
