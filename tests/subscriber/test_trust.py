"""A subscriber with trusted keys: what is not signed for it is refused, reported and gone around; no weight changes."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from chunkstore.errors import DeltasyncError
from chunkstore.memory import MemoryStore
from manifest.errors import Untrusted
from manifest.key_files import TrustConfig
from manifest.keys import STREAM, alternate_key, manifest_key
from manifest.log import VersionLog, open_stream
from manifest.restore import restore
from manifest.signing import Signer
from subscriber.engine import Prepared, Scattered
from subscriber.errors import EngineFailed
from subscriber.torch_engine import TorchEngine
from tests.subscriber.parts import (
    TIMEOUT,
    Worker,
    differing,
    live_bits,
    module_for,
    running,
    small_weights,
    until,
)
from tests.support.keys import make_signer
from tests.support.streams import StreamBuilder, random_weights

SIGNER, OTHER = make_signer("a"), make_signer("b")
RELIST = 0.05


@pytest.fixture
def builder(tmp_path: Path) -> StreamBuilder:
    return StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights(), signer=SIGNER)


def trusting(*signers: Signer, stream: str | None = None) -> TrustConfig:
    return TrustConfig(keys=tuple(str(signer.public) for signer in signers), stream=stream)


def follow(tmp_path: Path, builder: StreamBuilder, trust: TrustConfig | None = None) -> Worker:
    return Worker(tmp_path, builder, relist_interval=RELIST, trust=trust or trusting(SIGNER))


def bits_of(module: nn.Module) -> dict[str, bytes]:
    return {name: live_bits(tensor).tobytes() for name, tensor in module.state_dict().items()}


def once(worker: Worker) -> None:
    asyncio.run(worker.subscriber.run(once=True))


def test_a_signed_stream_is_followed(builder: StreamBuilder, tmp_path: Path) -> None:
    named = trusting(OTHER, SIGNER, stream=builder.log.stream.id.hex())
    worker = follow(tmp_path, builder, named)
    with running(worker.subscriber) as subscriber:
        for version in range(4):
            subscriber.wait_for(version, TIMEOUT)
            assert worker.holds(version)
            builder.train()
    assert not any(applied.from_anchor for applied in worker.applied[1:])


@pytest.mark.parametrize("wrong", ["unsigned", "another key", "tampered", "replayed", "moved"])
def test_what_is_not_to_be_trusted_is_refused_and_what_comes_later_followed(
    wrong: str, builder: StreamBuilder, tmp_path: Path
) -> None:
    elsewhere = StreamBuilder(MemoryStore("elsewhere"), small_weights(7), signer=SIGNER)
    elsewhere.train(steps=2)
    builder.train()
    worker = follow(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(1, TIMEOUT)
        builder.signer = {"unsigned": None, "another key": OTHER}.get(wrong, SIGNER)
        if wrong in ("unsigned", "another key"):
            builder.train()
        else:
            manifest = {
                "tampered": builder.make(builder.weights[1], 1).model_copy(update={"train_step": 77}),
                "replayed": elsewhere.manifests[2],
                "moved": builder.manifests[0],
            }[wrong]
            builder.store.put(manifest_key(2), manifest.data)
            builder.manifests.append(manifest)
            builder.weights.append(builder.weights[1])
        until(lambda: worker.refused() == [2])
        (refused,) = worker.status().refused
        assert refused.kind == ("manifest_invalid" if wrong == "moved" else "untrusted")
        assert manifest_key(2) in refused.message
        assert worker.engine.version == 1
        assert worker.holds(1)
        builder.signer = SIGNER
        builder.anchor()
        builder.train()
        subscriber.wait_for(4, TIMEOUT)
        assert worker.holds(4)


def test_versions_beyond_what_is_refused_do_not_hide_those_before_from_a_cold_start(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    builder.train(steps=2)
    builder.signer = None
    builder.train(steps=2)
    worker = follow(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(2, TIMEOUT)
        assert worker.holds(2)
        until(lambda: worker.refused() == [3, 4])


def test_an_unsigned_stream_is_refused_and_the_engine_left_without_weights(tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = follow(tmp_path, builder)
    before = bits_of(worker.module)
    with running(worker.subscriber):
        until(lambda: worker.refused() == [0])
    assert bits_of(worker.module) == before


def test_another_stream_in_its_place_is_refused_if_the_stream_is_named(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    """One key, two streams, and somebody copies all of one over the other."""
    elsewhere = StreamBuilder(MemoryStore("other run"), small_weights(7), signer=SIGNER)
    elsewhere.train(steps=3)
    builder.train()
    worker = follow(tmp_path, builder, trusting(SIGNER, stream=builder.log.stream.id.hex()))
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(1, TIMEOUT)
        for info in list(elsewhere.store.list_after("")):
            builder.store.put(info.key, elsewhere.store.get(info.key, limit=1 << 30))
        until(lambda: worker.reports(lambda said: STREAM in said and "is trusted" in said))
        assert worker.engine.version == 1
        assert worker.holds(1)
    worker.restart()
    with pytest.raises(Untrusted, match=r"only .* is trusted"):
        once(worker)
    assert worker.holds(1)


def test_keys_are_rotated_without_a_pause(builder: StreamBuilder, tmp_path: Path) -> None:
    worker = follow(tmp_path, builder, trusting(SIGNER, OTHER))
    once(worker)
    builder.signer = OTHER
    builder.train()
    once(worker)
    assert worker.holds(1)
    assert not worker.applied[-1].from_anchor
    builder.anchor()
    worker.config = worker.config.model_copy(update={"trust": trusting(OTHER)})
    once(worker)
    worker.restart()
    builder.train()
    once(worker)
    assert worker.holds(3)
    assert not worker.applied[-1].from_anchor


def test_what_a_revoked_key_has_signed_is_served_no_longer(builder: StreamBuilder, tmp_path: Path) -> None:
    worker = follow(tmp_path, builder, trusting(SIGNER))
    builder.train()
    once(worker)
    worker.config = worker.config.model_copy(update={"trust": trusting(OTHER)})
    worker.restart()
    with running(worker.subscriber) as subscriber:
        until(lambda: worker.refused() == [0, 1])
        assert worker.status().state == "held"
        builder.signer = OTHER
        builder.anchor()
        subscriber.wait_for(2, TIMEOUT)
    assert worker.holds(2)
    assert worker.applied[-1].from_anchor


class Failing(TorchEngine):
    """Writes nothing, and its subscriber cannot know that."""

    async def scatter(self, prepared: Prepared) -> Scattered:
        raise EngineFailed("injected")


def test_an_interrupted_apply_of_a_revoked_key_is_not_finished(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    worker = follow(tmp_path, builder)
    once(worker)
    builder.train()
    worker.restart()
    worker.engine.__class__ = Failing
    with pytest.raises(EngineFailed):
        once(worker)
    worker.config = worker.config.model_copy(update={"trust": trusting(OTHER)})
    worker.restart()
    once(worker)  # with nothing that it could go to
    assert worker.engine.version is None
    assert worker.holds(0)  # nothing was written
    builder.signer = OTHER
    builder.anchor()
    worker.restart()
    once(worker)
    assert worker.holds(2)
    assert worker.applied[-1].from_anchor


def cut_off(builder: StreamBuilder, first: int) -> None:
    for version in range(first, builder.version + 1):
        builder.store.delete(manifest_key(version))


def test_a_newly_started_engine_is_not_brought_below_what_it_had(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    """An attacker who may delete cuts the log off, and waits for an engine to restart."""
    builder.train(steps=3)
    worker = follow(tmp_path, builder)
    once(worker)
    cut_off(builder, 2)
    worker.module = module_for(builder.weights[0], builder.aliases)
    worker.restart(boot_id="another-life")
    before = bits_of(worker.module)
    with pytest.raises(Untrusted, match=r"up to 1, but version 3 was applied here before") as refused:
        once(worker)
    assert bits_of(worker.module) == before
    with running(worker.subscriber) as subscriber:
        until(lambda: worker.reports(lambda said: "was applied here before" in said))
        assert subscriber.report.status().state == "held"
        builder.store.put(manifest_key(2), builder.manifests[2].data)
        builder.store.put(manifest_key(3), builder.manifests[3].data)
        subscriber.wait_for(3, TIMEOUT)
        assert worker.holds(3)
        cut_off(builder, 2)
    Path(refused.value.hint.rpartition(" ")[2]).unlink()
    worker.restart(boot_id="a-third-life")
    once(worker)
    assert worker.engine.version == 1


def test_an_unsigned_log_may_be_cut_off(tmp_path: Path) -> None:
    """As before: a bucket that was restored from a backup starts engines without anybody's help."""
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    builder.train(steps=3)
    worker = Worker(tmp_path, builder)
    once(worker)
    cut_off(builder, 2)
    worker.restart(boot_id="another-life")
    once(worker)
    assert worker.engine.version == 1


def test_alternates_are_used_only_if_they_are_signed(builder: StreamBuilder, tmp_path: Path) -> None:
    builder.train()
    for chunk in builder.manifests[0].chunks:
        builder.store.delete(chunk.key)
    builder.signer = None
    builder.alternate(1)
    worker = follow(tmp_path, builder)
    with pytest.raises(DeltasyncError, match="no such object"):
        once(worker)
    builder.store.delete(alternate_key(1))
    builder.signer = SIGNER
    builder.alternate(1)
    worker.restart()
    once(worker)
    assert worker.holds(1)


# Every byte of every object


def signed_stream(store: MemoryStore) -> StreamBuilder:
    """One of everything: an anchor, a delta with differences, an alternate of that."""
    builder = StreamBuilder(store, random_weights({"a": (40,), "b": (3, 2)}, {"b": "F32"}), signer=SIGNER)
    builder.train(0.2)
    builder.alternate(1)
    return builder


def is_true(builder: StreamBuilder, version: int) -> bool:
    """Whether what is rebuilt as `version`, trusting the signer alone, is that."""
    log = VersionLog(builder.store, open_stream(builder.store), trust=SIGNER.trust)
    found: dict[str, bytes] = dict.fromkeys(builder.weights[version], b"")
    for spec, _, _, bits in restore(builder.store, log, version):
        found[spec.name] += bits.tobytes()
    return found == {name: tensor.bits.tobytes() for name, tensor in builder.weights[version].items()}


def test_no_byte_of_any_object_changes_a_weight_of_what_is_rebuilt() -> None:
    """Each byte in turn. What is damaged is refused or gone around, and never becomes other weights."""
    builder = signed_stream(MemoryStore("every byte"))
    refused = rebuilt = 0
    for info in list(builder.store.list_after("")):
        data = builder.store.get(info.key, limit=1 << 20)
        for position in range(len(data)):
            changed = bytearray(data)
            changed[position] ^= 1 << position % 8
            builder.store.put(info.key, bytes(changed))
            try:
                assert is_true(builder, 1), (info.key, position)
                rebuilt += 1
            except DeltasyncError:
                refused += 1
        builder.store.put(info.key, data)
    assert is_true(builder, 1)
    assert refused > 500
    assert (
        rebuilt > 500
    )  # where the anchor and the delta are damaged the alternate is used, and the other way round


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 1 << 30), flip=st.integers(1, 255), cold=st.booleans())
def test_no_byte_of_any_object_changes_a_weight_that_is_served(
    where: int, flip: int, cold: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("served")
    builder = signed_stream(MemoryStore.named(str(tmp_path)))
    worker = follow(tmp_path, builder)
    if not cold:
        once(worker)
        builder.train(0.2, steps=2)
        worker.restart()
    keys = [info.key for info in builder.store.list_after("") if not info.key.startswith("subscribers/")]
    key = keys[where % len(keys)]
    data = bytearray(builder.store.get(key, limit=1 << 20))
    data[where // len(keys) % len(data)] ^= flip
    builder.store.put(key, bytes(data))
    before = bits_of(worker.module)
    with suppress(DeltasyncError):
        once(worker)
    served = worker.engine.version
    assert served is not None or bits_of(worker.module) == before
    if served is not None:
        assert not differing(worker.module, builder.weights[served])
