"""A hundred versions behind: one plan, one pause, each manifest read once, and no more bytes than the cheaper way."""

import asyncio
from pathlib import Path

import pytest

from chunkstore import memory
from chunkstore.metrics import MetricsStore, StoreMetrics
from manifest.history import History
from manifest.keys import CHUNKS, alternate_key, manifest_key
from manifest.log import VersionLog
from manifest.plan import Applied, Plan
from subscriber.daemon import Subscriber
from subscriber.engine import Prepared, Scattered
from subscriber.torch_engine import TorchEngine
from tests.subscriber.parts import CountingStore, Worker
from tests.support.streams import StreamBuilder, random_weights

BEHIND = 100


class Pausing(TorchEngine):
    """Counts its pauses."""

    pauses = 0

    async def scatter(self, prepared: Prepared) -> Scattered:
        self.pauses += 1
        return await super().scatter(prepared)


@pytest.fixture
def builder(tmp_path: Path) -> StreamBuilder:
    store = memory._named[str(tmp_path)] = CountingStore(str(tmp_path))
    return StreamBuilder(store, random_weights({"w": (400, 300), "b": (400,)}))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Every plan that anybody makes."""
    made: list[Plan] = []
    plan = History.plan

    def noting(self: History, *args: object, **options: object) -> Plan:
        made.append(plan(self, *args, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(History, "plan", noting)
    return made


def catch_up(worker: Worker) -> Pausing:
    engine = Pausing(worker.module, boot_id="boot")
    worker.engine = engine
    worker.subscriber = Subscriber(worker.config, engine, worker.applied.append)
    asyncio.run(worker.subscriber.run(once=True))
    return engine


def chunk_bytes(store: CountingStore) -> int:
    """Of everything that was read below chunks/."""
    keys = [key for key in store.reads.elements() if key.startswith(CHUNKS)]
    sizes = {info.key: info.size for info in store.list_after(CHUNKS)}
    return sum(sizes[key] for key in keys)


@pytest.mark.parametrize(
    ("fraction", "anchor", "cold"),
    [(0.001, BEHIND - 5, False), (0.05, BEHIND - 5, False), (0.001, None, True), (0.05, BEHIND - 5, True)],
    ids=["by deltas", "by an anchor", "cold by deltas", "cold by an anchor"],
)
def test_a_hundred_versions_behind(
    fraction: float, anchor: int | None, cold: bool, builder: StreamBuilder, plans: list[Plan], tmp_path: Path
) -> None:
    store = builder.store
    assert isinstance(store, CountingStore)
    worker = Worker(tmp_path, builder)
    if not cold:
        catch_up(worker)
    builder.train(fraction, steps=BEHIND)
    chain = sum(m.nbytes for m in builder.manifests[(0 if cold else 1) :])
    from_anchor = chain
    if anchor is not None:
        from_anchor = builder.alternate(anchor).nbytes + sum(
            m.nbytes for m in builder.manifests[anchor + 1 :]
        )
    assert (chain <= from_anchor) == (fraction < 0.01), "or the test does not test both"
    store.reads.clear()
    worker.applied.clear()
    plans.clear()
    engine = catch_up(worker)
    assert worker.holds(BEHIND)
    (applied,) = worker.applied
    assert (engine.pauses, applied.version) == (1, BEHIND)
    assert applied.nbytes == min(chain, from_anchor) == chunk_bytes(store)
    # A cold start first looks whether the engine holds a version that it would pass; what it reads for that is kept.
    assert len(plans) == (2 if cold else 1)
    read = {m.version: n for m in builder.manifests if (n := store.reads[manifest_key(m.version)])}
    assert read.pop(BEHIND) <= 2, "once to see that it is no stray"
    assert set(read.values()) == {1}
    assert store.reads[alternate_key(anchor or 0)] == (2 if cold and anchor else 1 if anchor else 0)
    # Reading stops where the deltas outweigh the anchor, give or take what is being read ahead.
    outweigh = sum(builder.manifests[version].nbytes for version in read if version)
    assert outweigh <= min(chain, from_anchor) + 10 * max(m.nbytes for m in builder.manifests[1:])


def test_one_delta_costs_one_manifest_and_no_listing(builder: StreamBuilder) -> None:
    builder.train(0.01, steps=2)
    counts = StoreMetrics()
    history = History(VersionLog(MetricsStore(builder.store, counts), builder.log.stream))
    held = history.read(1)
    assert held is not None
    found = history.plan(Applied(1, held.root, held.hash), 2)
    assert [step.version for step in found.steps] == [2]
    assert {operation: stats.calls for operation, stats in counts.snapshot().items()} == {"get": 2}
