"""The subscriber end to end: real stores, real streams, real modules."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from chunkstore.codec import WINDOW
from chunkstore.errors import AccessDenied, ConfigError, DeltasyncError, ObjectMissing
from chunkstore.memory import MemoryStore
from chunkstore.open import StoreConfig
from chunkstore.posix import PosixStore
from chunkstore.store import Store
from subscriber.config import SubscriberConfig
from subscriber.daemon import AppliedVersion, Subscriber
from subscriber.engine import Prepared
from subscriber.staging import StagedUpdate
from subscriber.threads import in_thread
from subscriber.torch_engine import TorchEngine
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights, until
from tests.support.streams import StreamBuilder, perturbed, random_weights


@pytest.fixture(params=["memory", "posix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "posix":
        yield PosixStore(tmp_path / "store")
    else:
        yield MemoryStore.named(str(tmp_path))


@pytest.fixture
def builder(store: Store) -> StreamBuilder:
    return StreamBuilder(store, small_weights())


def test_cold_start_from_the_anchor_then_every_version_bit_identical(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    """FIELD_REPORTS: prime-rl#3524, AReaL#1439: every tensor in its own dtype, bit-exact."""
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        assert worker.holds(0)
        for version in range(1, 6):
            builder.train()
            subscriber.wait_for(version, TIMEOUT)
            assert worker.holds(version)
            assert worker.engine.version == version
    assert [applied.version for applied in worker.applied] == list(range(6))
    assert {"detect", "fetch", "stage", "prepare", "scatter", "pause"} == set(worker.applied[-1].seconds)
    assert worker.applied[-1].manifest == builder.manifests[-1]


def test_once_catches_up_in_one_pause_and_returns(builder: StreamBuilder, tmp_path: Path) -> None:
    builder.train(steps=4)
    worker = Worker(tmp_path, builder)
    asyncio.run(worker.subscriber.run(once=True))
    assert worker.holds(4)
    assert len(worker.applied) == 1


@given(
    moves=st.lists(st.sampled_from(["delta", "far delta", "anchor", "takeover", "alternate", "sync", "boot"]))
)
@settings(max_examples=25, deadline=None)
def test_any_history_ends_bit_identical(moves: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("history")
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder)
    alternates = {0}  # an anchor at version 0 cannot have one
    for move in [*moves, "sync"]:
        if move == "delta":
            builder.train()
        elif move == "far delta":
            builder.delta(perturbed(builder.weights[-1], 0.2, seed=builder.version), base=0)
        elif move == "anchor":
            builder.anchor(perturbed(builder.weights[-1], 0.5, seed=builder.version))
        elif move == "takeover":
            builder.takeover(f"publisher-{builder.version:06d}".encode())
        elif move == "alternate":
            if builder.version not in alternates:
                alternates.add(builder.version)
                builder.alternate(builder.version)
        else:
            worker.restart()
            if move == "boot":  # the weights are lost, and so is what the journal knew
                worker.engine = TorchEngine(worker.module)
                worker.subscriber = Subscriber(worker.config, worker.engine)
                for tensor in worker.module.state_dict().values():
                    tensor.zero_()
            asyncio.run(worker.subscriber.run(once=True))
            assert worker.holds(builder.version)


def test_tensors_of_several_windows(tmp_path: Path) -> None:
    weights = random_weights({"big": (3, WINDOW // 2), "small": (5,)})
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), weights, per_chunk=1)
    builder.train(0.001, steps=2)
    worker = Worker(tmp_path, builder)
    asyncio.run(worker.subscriber.run(once=True))
    assert worker.holds(2)
    builder.train(0.001, steps=2)
    worker.restart()
    asyncio.run(worker.subscriber.run(once=True))
    assert worker.holds(4)


def before_the_stream(tmp_path: Path, folder: bool) -> Worker:
    """Of a store that has no stream, or no folder, yet."""
    elsewhere = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    if folder:
        (tmp_path / "store").mkdir()
    return Worker(tmp_path, elsewhere, store=StoreConfig(url=str(tmp_path / "store")))


@pytest.mark.parametrize(
    ("folder", "kind", "why"), [(True, ObjectMissing, "no stream"), (False, AccessDenied, "is not there")]
)
def test_once_says_that_there_is_no_stream(
    folder: bool, kind: type[DeltasyncError], why: str, tmp_path: Path
) -> None:
    worker = before_the_stream(tmp_path, folder)
    with pytest.raises(kind, match=why):
        asyncio.run(worker.subscriber.run(once=True))


@pytest.mark.parametrize(
    ("folder", "kind", "why"),
    [(True, "object_missing", "no stream"), (False, "access_denied", "is not there")],
)
def test_a_subscriber_may_be_there_before_the_stream(
    folder: bool, kind: str, why: str, tmp_path: Path
) -> None:
    worker = before_the_stream(tmp_path, folder)
    with running(worker.subscriber) as subscriber:
        until(lambda: worker.reports(lambda message: why in message))
        with pytest.raises(TimeoutError, match=kind):
            subscriber.wait_for(0, 0.01)
        StreamBuilder(PosixStore(tmp_path / "store"), small_weights())
        subscriber.wait_for(0, TIMEOUT)
        assert worker.holds(0)


def test_the_next_versions_are_fetched_while_one_is_prepared(tmp_path: Path) -> None:
    class Waiting(TorchEngine):
        """Prepares version 1 only once all chunks of version 2 have come."""

        async def prepare(self, staged: StagedUpdate) -> Prepared:
            if staged.target.version == 1:
                builder.train()
                names = {f"{chunk.hash.hex()}.chunk" for chunk in builder.manifests[2].chunks}
                folder = worker.config.staging_path / "chunks"
                await in_thread(lambda _: until(lambda: names <= {path.name for path in folder.iterdir()}))
            return await super().prepare(staged)

    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder)
    worker.subscriber = Subscriber(worker.config, Waiting(worker.module), worker.applied.append)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        builder.train()
        subscriber.wait_for(2, TIMEOUT)
    assert worker.holds(2)


def test_the_status_object_is_a_lease(builder: StreamBuilder, tmp_path: Path) -> None:
    worker = Worker(tmp_path, builder, status_interval=0.05)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        until(lambda: worker.refused() == [] and worker.status().applied_version == 0)
        first = worker.status()
        assert (first.state, first.needs_version, first.stream) == ("serving", 0, builder.log.stream.id.hex())
        until(lambda: worker.status().updated_at > first.updated_at)
    assert worker.status().state == "stopped"


def test_an_error_in_on_applied_ends_the_run_and_reaches_who_waits(tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder)

    def broken(applied: AppliedVersion) -> None:
        raise ZeroDivisionError(applied.version)

    with (
        running(Subscriber(worker.config, worker.engine, broken)) as subscriber,
        pytest.raises(ZeroDivisionError),
    ):
        subscriber.wait_for(1, TIMEOUT)
    assert worker.holds(0)


def test_the_configuration_may_be_a_file_or_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "subscriber.yaml"
    file.write_text(f"store: {{url: {tmp_path / 'store'}}}\nid: rollout-1\n")
    by_hand = {"store": {"url": str(tmp_path / "store")}, "id": "rollout-1"}
    engine = TorchEngine(nn.Linear(1, 1))
    configs = [Subscriber(given, engine).config for given in (file, str(file), by_hand)]
    assert configs == [SubscriberConfig.model_validate(by_hand)] * 3
    with pytest.raises(ConfigError, match="the config given to Subscriber: 1 wrong key\n  ids: "):
        Subscriber(by_hand | {"ids": 3}, engine)
