"""One object flipped, truncated or removed: it is named, nothing is applied, and all is well once it is back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from chunkstore.memory import MemoryStore
from manifest.catalog import root_digest
from manifest.keys import STREAM, catalog_key, manifest_key, version_name
from manifest.schema import MAX_MANIFEST_BYTES
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights, until
from tests.support.streams import StreamBuilder, digests_of

NEWEST = 2
DAMAGES = ("flip", "truncate", "remove")


def make_builder(name: str, versions: int = NEWEST) -> StreamBuilder:
    builder = StreamBuilder(MemoryStore.named(name), small_weights(), per_chunk=5)
    builder.train(steps=versions)
    return builder


def objects() -> list[str]:
    """Every object of the stream, all of which a cold start needs; keys are the same in every stream built alike."""
    builder = make_builder("objects of the fault tests")
    return [info.key for info in builder.store.list_after("")]


def damage(builder: StreamBuilder, key: str, how: str) -> Callable[[], None]:
    """Do it, and return how to undo it."""
    store = builder.store
    data = store.get(key, limit=MAX_MANIFEST_BYTES)
    if how == "remove":
        store.delete(key)
    elif how == "truncate":
        store.put(key, data[: len(data) // 2])
    else:
        # In a manifest, inside the root digest: a flip that only changes a remark, such as the time, does no harm.
        manifest = next((m for m in builder.manifests if manifest_key(m.version) == key), None)
        at = len(data) // 2 if manifest is None else data.index(manifest.root) + 5
        store.put(key, data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    return lambda: store.put(key, data)


def names(message: str, key: str) -> bool:
    """Whether the message names the object; of a manifest, at least its version."""
    version = key.removeprefix("versions/")
    return key in message or (key.startswith("versions/") and f"version {int(version)}" in message)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("key", objects())
def test_cold_start_with_one_damaged_object_applies_nothing_and_recovers(
    key: str, how: str, tmp_path: Path
) -> None:
    """FIELD_REPORTS: vmlx-swift#217, rllm#622, AReaL#1569."""
    builder = make_builder(str(tmp_path))
    restore = damage(builder, key, how)
    worker = Worker(tmp_path, builder)
    before = {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}
    with running(worker.subscriber) as subscriber:
        reachable = reachable_without(key, how)
        if reachable is not None:
            subscriber.wait_for(reachable, TIMEOUT)
            assert worker.holds(reachable)
            refused = [refusal.version for refusal in subscriber.report.status().refused]
            assert refused == ([] if (key, how) == (manifest_key(NEWEST), "remove") else [NEWEST])
        else:
            until(
                lambda: worker.reports(
                    lambda message: names(message, key) or is_stream_flip(message, key, how)
                )
            )
            assert subscriber.version is None
            assert not subscriber.report.ready
            assert all(tensor.equal(before[name]) for name, tensor in worker.module.state_dict().items())
        restore()
        subscriber.wait_for(NEWEST, TIMEOUT)
        assert worker.holds(NEWEST)
        assert subscriber.report.status().last_error is None
        assert not subscriber.report.status().refused


def reachable_without(key: str, how: str) -> int | None:
    """The version to go to: what is no manifest, or has no predecessor, is no version and hides none."""
    if how == "flip":  # a manifest still, and a wrong one
        return None
    return {
        manifest_key(NEWEST): NEWEST - 1,
        manifest_key(NEWEST - 1): NEWEST - 2 if how == "remove" else None,
    }.get(key)


def is_stream_flip(message: str, key: str, how: str) -> bool:
    """A flipped stream id is another valid id: every manifest is then foreign, and the message shows both ids."""
    return (key, how) == (STREAM, "flip") and "belongs to stream" in message


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize(
    "key", [key for key in objects() if version_name(NEWEST) in key or version_name(1) in key]
)
def test_while_serving_a_damaged_object_leaves_the_old_version_in_service(
    key: str, how: str, tmp_path: Path
) -> None:
    """FIELD_REPORTS: modelexpress#703, AReaL#1181, trl#5892."""
    builder = make_builder(str(tmp_path), versions=0)
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
    builder.train(steps=NEWEST)
    restore = damage(builder, key, how)
    worker.restart()
    with running(worker.subscriber) as subscriber:
        if key == manifest_key(NEWEST) and how != "flip":
            subscriber.wait_for(NEWEST - 1, TIMEOUT)
            until(lambda: how == "remove" or worker.refused() == [NEWEST])
        else:
            until(lambda: worker.reports(lambda message: names(message, key)))
            assert worker.holds(0)
            assert subscriber.report.ready
            assert worker.engine.version == 0
        restore()
        subscriber.wait_for(NEWEST, TIMEOUT)
        assert worker.holds(NEWEST)


def test_a_lost_chunk_is_named_and_gone_around_by_an_anchor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FIELD_REPORTS: modelexpress#703: several versions behind and the middle one missing."""
    builder = make_builder(str(tmp_path), versions=0)
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
    builder.train(steps=2)
    builder.alternate(2)
    builder.train()
    for chunk in builder.manifests[1].chunks:
        builder.store.delete(chunk.key)
    worker.restart()
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(3, TIMEOUT)
        assert worker.holds(3)
        assert worker.applied[-1].from_anchor
    named = [record.message for record in caplog.records if record.message.startswith("path_failed")]
    assert any(chunk.key in message for chunk in builder.manifests[1].chunks for message in named)


def test_a_version_nobody_can_apply_is_refused_and_the_next_anchor_is_taken(tmp_path: Path) -> None:
    builder = make_builder(str(tmp_path), versions=1)
    damage(builder, builder.manifests[1].chunks[0].key, "remove")
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        until(lambda: worker.refused() == [1])
        refusal = worker.status().refused[0]
        assert refusal.kind == "object_missing"
        assert builder.manifests[1].chunks[0].key in refusal.message
        builder.anchor()
        subscriber.wait_for(2, TIMEOUT)
        assert worker.holds(2)
        until(lambda: worker.status().applied_version == 2)
        assert not worker.status().refused


def test_a_delta_whose_digests_lie_is_never_written(tmp_path: Path) -> None:
    """A publisher's bug, not damage: all hashes fit, the digests do not. Verified before the first write."""
    builder = make_builder(str(tmp_path), versions=0)
    worker = Worker(tmp_path, builder)
    sent, promised = small_weights(seed=8), digests_of(small_weights(seed=9), builder.catalog)
    root = root_digest(builder.catalog, promised)
    lie = builder.make(sent, 0, digests=promised.astype("<u8").tobytes(), root=root)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        builder.commit(lie, sent)
        until(lambda: worker.refused() == [1])
        assert worker.holds(0)
        assert worker.engine.version == 0
        assert worker.status().refused[0].kind == "verification_failed"
        assert "'layers.0.w.weight'" in worker.status().refused[0].message
        builder.anchor(small_weights(seed=7))
        subscriber.wait_for(2, TIMEOUT)
        assert worker.holds(2)


def test_catalog_hash_is_among_the_objects() -> None:
    """The parametrised tests above cover what they claim to."""
    builder = make_builder("objects of the fault tests")
    found = objects()
    assert {STREAM, catalog_key(builder.catalog.hash)} < set(found)
    assert {chunk.key for manifest in builder.manifests for chunk in manifest.chunks} < set(found)
