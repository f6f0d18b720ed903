"""What the engine really holds decides: restarts, drift, foreign writes, and repairs from an anchor."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chunkstore.memory import MemoryStore
from subscriber.daemon import Subscriber
from subscriber.engine import Prepared, Scattered
from subscriber.errors import EngineFailed, SubscriberBusy
from subscriber.staging import StagedUpdate
from subscriber.torch_engine import TorchEngine
from tests.subscriber.parts import TIMEOUT, Worker, module_for, running, small_weights, until
from tests.support.streams import StreamBuilder, Weights


@pytest.fixture
def builder(tmp_path: Path) -> StreamBuilder:
    return StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())


def load(module: torch.nn.Module, weights: Weights) -> None:
    """Put `weights` into the module behind the subscriber's back."""
    for name, tensor in module.state_dict().items():
        bits = torch.from_numpy(weights[name].bits.copy().view(f"i{weights[name].bits.itemsize}"))
        tensor.view(bits.dtype).copy_(bits)


def once(worker: Worker) -> None:
    asyncio.run(worker.subscriber.run(once=True))


def test_a_module_loaded_from_a_checkpoint_is_recognised_and_only_deltas_are_fetched(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    """FIELD_REPORTS: prime-rl#2823: a worker restarts holding the base and only the newest patch fits it not."""
    builder.train(steps=3)
    worker = Worker(tmp_path, builder)
    load(worker.module, builder.weights[0])
    for chunk in builder.manifests[0].chunks:
        builder.store.delete(chunk.key)
    once(worker)
    assert worker.holds(3)
    assert not worker.applied[0].from_anchor


@pytest.mark.parametrize("version", [0, None])
def test_the_journal_is_believed_only_if_the_weights_agree(
    version: int | None, builder: StreamBuilder, tmp_path: Path
) -> None:
    """FIELD_REPORTS: prime-rl#2823. The weights are those of an older version after all, or of none."""
    worker = Worker(tmp_path, builder)
    builder.train(steps=2)
    once(worker)
    load(worker.module, small_weights(seed=5) if version is None else builder.weights[version])
    builder.train()
    worker.restart()
    once(worker)
    assert worker.holds(3)
    assert worker.applied[-1].from_anchor == (version is None)


def flip_a_bit(module: torch.nn.Module) -> None:
    """What a memory error, or somebody else's code, does."""
    with torch.no_grad():
        module.get_parameter("router.weight").view(torch.int32)[0, 0] ^= 1


def test_drift_is_found_by_the_audit_and_healed_from_an_anchor(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    held: list[str] = []

    class Held(TorchEngine):
        async def hold(self, reason: str) -> None:
            held.append(reason)
            await super().hold(reason)

    worker = Worker(tmp_path, builder, audit_every=1)
    worker.engine = Held(worker.module)
    worker.subscriber = Subscriber(worker.config, worker.engine, worker.applied.append)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        held.clear()
        flip_a_bit(worker.module)
        builder.delta(dict(builder.weights[0]) | {"scale": small_weights(seed=3)["scale"]})
        until(lambda: [applied.from_anchor for applied in worker.applied] == [True, False, True])
        subscriber.wait_for(1, TIMEOUT)
        assert worker.holds(1)
        text = subscriber.report.metrics.text().decode()
        assert 'deltasync_subscriber_audits_total{result="drift"} 1.0' in text
    assert ["no longer those of version 1: router.weight" in reason for reason in held] == [True]


class Interfering(TorchEngine):
    """Somebody writes the module between prepare and scatter, once."""

    done = False

    async def prepare(self, staged: StagedUpdate) -> Prepared:
        prepared = await super().prepare(staged)
        if staged.base is not None and not self.done:
            self.done = True
            flip_a_bit(self.module)
        return prepared


def test_a_foreign_write_between_prepare_and_scatter_is_noticed(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    worker = Worker(tmp_path, builder)
    worker.engine = Interfering(worker.module)
    worker.subscriber = Subscriber(worker.config, worker.engine, worker.applied.append)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        weights = dict(builder.weights[0]) | {"scale": small_weights(seed=3)["scale"]}
        builder.delta(weights)
        subscriber.wait_for(1, TIMEOUT)
        assert worker.holds(1)
        assert worker.applied[-1].from_anchor
        assert "engine_changed" in subscriber.report.metrics.text().decode()


class Failing(TorchEngine):
    """Writing fails in the middle, `failures` times: the device ran out of memory. `trying`: called before each try."""

    failures = 2
    trying: Callable[[], object] = staticmethod(lambda: None)

    async def scatter(self, prepared: Prepared) -> Scattered:
        self.trying()
        if prepared.staged.target.version and self.failures:
            self.failures -= 1
            self._gate.close("being written")
            self.module.get_parameter("embed.weight").data.zero_()
            raise EngineFailed("out of memory")
        return await super().scatter(prepared)


def test_a_write_that_fails_leaves_the_engine_paused_until_it_is_repaired(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    """FIELD_REPORTS: AReaL#1181, trl#5892, sglang-omni#784."""
    worker = Worker(tmp_path, builder)
    engine = worker.engine = Failing(worker.module)
    worker.subscriber = Subscriber(worker.config, engine, worker.applied.append)
    said: list[tuple[int | None, bool]] = []
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        engine.trying = lambda: said.append((subscriber.version, subscriber.report.ready))
        builder.train()
        with engine.serving(TIMEOUT):
            pass
        subscriber.wait_for(1, TIMEOUT)
        assert engine.failures == 0
        assert worker.holds(1)
    assert said[0] == (0, True)
    assert len(said) > 2
    assert set(said[1:]) == {(None, False)}, "who asks is told so, too"


def test_a_catch_up_is_one_pause_and_a_newer_target_is_taken_along(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    class Slow(TorchEngine):
        """While the first update is being prepared, more versions appear."""

        pauses = 0

        async def prepare(self, staged: StagedUpdate) -> Prepared:
            if builder.version < 4:
                builder.train(steps=2)
            return await super().prepare(staged)

        async def scatter(self, prepared: Prepared) -> Scattered:
            self.pauses += 1
            return await super().scatter(prepared)

    worker = Worker(tmp_path, builder)
    engine = Slow(worker.module)
    subscriber = Subscriber(worker.config, engine, worker.applied.append)
    asyncio.run(subscriber.run(until_version=4))
    assert worker.holds(4)
    assert engine.pauses == 1
    assert [applied.version for applied in worker.applied] == [4]
    assert len(worker.applied[0].manifests) == 5


def test_an_update_larger_than_the_disk_is_refused_before_it_is_fetched(
    builder: StreamBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 100

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        until(lambda: worker.reports(lambda message: "100 are free" in message))
        monkeypatch.undo()
        subscriber.wait_for(0, TIMEOUT)


def test_nothing_is_left_behind_on_disk(builder: StreamBuilder, tmp_path: Path) -> None:
    worker = Worker(tmp_path, builder)
    builder.train(steps=3)
    once(worker)
    left = [path for path in worker.config.staging_path.rglob("*") if path.is_file()]
    assert not left


def test_two_engines_with_one_id_are_refused(builder: StreamBuilder, tmp_path: Path) -> None:
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        second = Subscriber(worker.config, TorchEngine(module_for(builder.weights[0])))
        second.start()
        with pytest.raises(SubscriberBusy, match="another subscriber"):
            second.wait_for(0, TIMEOUT)


def test_two_that_share_only_the_staging_folder_are_refused_until_one_is_gone(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    worker, shared = Worker(tmp_path, builder, staging_dir=tmp_path / "shared"), tmp_path / "shared"
    other = Worker(tmp_path, builder, staging_dir=shared, state_dir=tmp_path / "other")
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        with pytest.raises(SubscriberBusy, match=f"another subscriber uses {shared}") as caught:
            other.check_cold_start(0)
        assert "staging_dir" in caught.value.hint
    other.check_cold_start(0)
    worker.restart()
    worker.check_cold_start(0)
