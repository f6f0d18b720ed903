"""Verifying a stream: a sound one has no problems, and each kind of damage is named, all of them in one go."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkstore.errors import StoreUnavailable
from chunkstore.memory import MemoryStore
from manifest.keys import STREAM, alternate_key, catalog_key, manifest_key
from manifest.schema import Manifest
from manifest.verify import VerifyReport, verify_stream
from tests.support.faults import FaultStore
from tests.support.manifests import altered
from tests.support.streams import StreamBuilder, random_weights

SHAPES = {"a": (4, 5), "b": (), "c": (0, 3), "d": (7,), "e": (3, 3)}
DTYPES = {"d": "F32"}


def build() -> StreamBuilder:
    """Versions: 0 anchor, 1 to 3 deltas, 4 takeover, 5 delta against 2, 6 anchor, 7 delta; alternate of 3."""
    stream = StreamBuilder(MemoryStore("s"), random_weights(SHAPES, DTYPES), per_chunk=2)
    stream.train(0.4, steps=3)
    stream.takeover(b"another-publish!")
    stream.delta(random_weights(SHAPES, DTYPES, seed=4), base=2)
    stream.anchor()
    stream.train(0.4)
    stream.alternate(3)
    return stream


def found(report: VerifyReport) -> list[tuple[str, str]]:
    return sorted((p.key, p.kind) for p in report.problems)


def test_a_sound_stream_has_no_problems(tmp_path: Path) -> None:
    stream = build()
    report = verify_stream(stream.store, tmp_path)
    assert report.problems == ()
    assert report.ok
    assert report.unverified == ()
    assert (report.versions, report.newest, report.alternates) == (8, 7, 1)
    alternate = stream.log.read_alternate(3)
    assert alternate is not None
    read = [*stream.manifests, alternate]
    assert report.chunks == sum(len(m.chunks) for m in read)
    assert report.nbytes == sum(m.nbytes for m in read)
    assert report.stream == stream.log.stream.id.hex()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_stream_and_no_stream() -> None:
    store = MemoryStore("s")
    report = verify_stream(store)
    assert found(report) == [(STREAM, "object_missing")]
    assert report.stream is None
    stream = StreamBuilder(store, random_weights({"a": (2,)}))
    store.delete(manifest_key(0))
    assert verify_stream(stream.store).ok


def test_a_stream_without_elements() -> None:
    stream = StreamBuilder(MemoryStore(), random_weights({"a": (0,), "b": (3, 0)}))
    stream.takeover(b"q" * 16)
    assert verify_stream(stream.store).problems == ()


def truncate(store: MemoryStore, key: str) -> None:
    store.put(key, store.get(key, limit=1 << 30)[:-1])


def flip(store: MemoryStore, key: str) -> None:
    data = bytearray(store.get(key, limit=1 << 30))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


@pytest.mark.parametrize("damage", [truncate, flip, MemoryStore.delete])
@pytest.mark.parametrize(
    ("version", "unverified"),
    [(0, {0, 1, 2, 5}), (2, {2, 5}), (3, set()), (5, {5}), (6, {6, 7}), (7, {7})],  # 3 has an alternate
)
def test_a_damaged_chunk_is_named_with_every_version_that_needs_it(
    damage: Callable[[MemoryStore, str], None], version: int, unverified: set[int]
) -> None:
    stream = build()
    assert isinstance(stream.store, MemoryStore)
    key = stream.manifests[version].chunks[0].key
    damage(stream.store, key)
    report = verify_stream(stream.store)
    assert found(report) == [(key, "object_missing" if damage is MemoryStore.delete else "corrupt_object")]
    assert set(report.unverified) == unverified


def test_every_problem_is_listed() -> None:
    stream = build()
    chunk, catalog = stream.manifests[1].chunks[0].key, catalog_key(stream.catalog.hash)
    stream.store.delete(chunk)
    stream.store.put(manifest_key(3), b"junk")
    stream.store.delete(manifest_key(5))
    report = verify_stream(stream.store)
    assert found(report) == sorted(
        [
            (chunk, "object_missing"),
            (manifest_key(3), "manifest_invalid"),
            (manifest_key(5), "chain"),
            (alternate_key(3), "manifest_invalid"),  # what it re-encodes cannot be read
        ]
    )
    assert report.unverified == (1, 2, 3, 4)
    stream.store.put(catalog, b"junk")
    assert (catalog, "corrupt_object") in found(verify_stream(stream.store))


@pytest.mark.parametrize(
    ("changes", "kind", "why"),
    [
        ({"epoch": 0}, "chain", "epoch 0 is below"),
        ({"parent_hash": b"x" * 32}, "chain", "parent"),
        ({"stream": b"f" * 16}, "foreign_stream", "belongs to stream"),
        ({"version": 9}, "manifest_invalid", None),
        ({"digests": bytes(40)}, "manifest_invalid", "root digest"),
        ({"chunks": []}, "manifest_invalid", "changes the root"),
    ],
)
def test_a_manifest_that_lies_is_named(changes: dict[str, Any], kind: str, why: str | None) -> None:
    stream = build()
    stream.store.put(manifest_key(7), altered(stream.manifests[7], **changes).data)
    (problem,) = verify_stream(stream.store).problems
    assert (problem.key, problem.kind) == (manifest_key(7), kind)
    assert why is None or why in problem.message


def test_a_gap_however_wide_is_one_problem() -> None:
    stream = build()
    stream.store.put(manifest_key(10**20 - 1), stream.manifests[7].data)
    report = verify_stream(stream.store)
    assert found(report) == [(manifest_key(8), "chain"), (manifest_key(10**20 - 1), "manifest_invalid")]
    assert report.unverified == (10**20 - 1,)


def test_digests_that_the_chunks_do_not_give_are_found() -> None:
    stream = StreamBuilder(MemoryStore(), random_weights(SHAPES, DTYPES))
    honest = stream.make(random_weights(SHAPES, DTYPES, seed=1), 0)
    fields = honest.model_dump() | {"digests": stream.manifests[0].digests, "root": stream.manifests[0].root}
    stream.commit(Manifest(**fields), stream.weights[0])
    report = verify_stream(stream.store)
    assert found(report) == [(manifest_key(1), "corrupt_object")]
    assert report.unverified == (1,)


def test_a_damaged_alternate_harms_no_version() -> None:
    stream = build()
    alternate = stream.log.read_alternate(3)
    assert alternate is not None
    stream.store.delete(alternate.chunks[0].key)
    report = verify_stream(stream.store)
    assert found(report) == [(alternate.chunks[0].key, "object_missing")]
    assert report.unverified == ()
    stream.store.put(alternate_key(3), altered(alternate, root=b"x" * 32).data)
    kinds = {kind for key, kind in found(verify_stream(stream.store)) if key == alternate_key(3)}
    assert kinds == {"chain", "manifest_invalid"}


def test_a_catalog_may_change_at_an_anchor() -> None:
    stream = StreamBuilder(MemoryStore(), random_weights(SHAPES, DTYPES))
    stream.train(0.3)
    stream.anchor(random_weights(SHAPES | {"new": (4,)}, DTYPES, seed=3))
    stream.train(0.3)
    assert verify_stream(stream.store).problems == ()


def test_a_store_that_fails_is_a_problem_and_not_the_end() -> None:
    stream = build()
    flaky = stream.manifests[3].chunks[0].key
    store = FaultStore(stream.store, before=lambda _, key: StoreUnavailable("503") if key == flaky else None)
    assert found(verify_stream(store)) == [(flaky, "store_unavailable")]
    store = FaultStore(stream.store, before=lambda op, _: StoreUnavailable("503") if op == "list" else None)
    assert found(verify_stream(store)) == [
        ("alternates/", "store_unavailable"),
        ("versions/", "store_unavailable"),
    ]
