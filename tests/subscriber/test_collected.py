"""Garbage collection beside a subscriber: its lease protects it, and what is gone all the same it goes around."""

import time
from pathlib import Path

import pytest

from chunkstore import memory
from manifest.collect import delete_garbage, read_holdings
from manifest.gc import Garbage, Policy, collectable
from tests.subscriber.parts import TIMEOUT, CountingStore, Worker, running, small_weights, until
from tests.support.streams import StreamBuilder

POLICY = Policy(grace=60)


class Dated(CountingStore):
    """`ahead`: seconds by which its clock is ahead of everybody else's."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ahead = 0.0
        self._clock = lambda: time.time() + self.ahead


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dated:
    store = Dated(str(tmp_path))
    monkeypatch.setitem(memory._named, str(tmp_path), store)
    return store


@pytest.fixture
def builder(store: Dated) -> StreamBuilder:
    """Versions 0 … 6 and a dearer anchor of 1, so that a path begins at 0; all older than the grace period."""
    built = StreamBuilder(store, small_weights(), per_chunk=9)
    built.takeover(b"another-publish!")
    built.train(0.1, steps=5)
    built.per_chunk = 1
    built.alternate(1)
    store.ahead = 100.0
    return built


def collect(builder: StreamBuilder) -> Garbage:
    garbage = collectable(read_holdings(builder.log, POLICY), POLICY)
    delete_garbage(builder.store, garbage.objects)
    return garbage


def test_a_cold_start_on_the_old_path_keeps_it_until_it_is_through(
    store: Dated, builder: StreamBuilder, tmp_path: Path
) -> None:
    worker = Worker(tmp_path, builder, fetch_concurrency=1)
    store.open.clear()
    store.hold(builder.manifests[0].chunks[0].key)
    with running(worker.subscriber) as subscriber:
        assert store.held.wait(TIMEOUT)
        assert collect(builder).floor == 0
        store.open.set()
        subscriber.wait_for(6, TIMEOUT)
        assert worker.holds(6)
        assert worker.applied[0].manifests[0].version == 0
        until(lambda: worker.status().needs_version == 6)
        assert collect(builder).floor == 1
        assert collect(builder).objects == ()


def test_a_reader_whose_objects_are_gone_starts_from_the_newest_anchor(
    store: Dated, builder: StreamBuilder, tmp_path: Path
) -> None:
    worker = Worker(tmp_path, builder, fetch_concurrency=1)
    store.open.clear()
    store.hold(builder.manifests[0].chunks[0].key)
    with running(worker.subscriber) as subscriber:
        assert store.held.wait(TIMEOUT)
        store.ahead += 1000.0  # its lease has run out: it was cut off from the store, or stopped
        assert collect(builder).floor == 1
        store.open.set()
        subscriber.wait_for(6, TIMEOUT)
        assert worker.holds(6)
        assert worker.applied[0].manifests[0].version == 1
        assert worker.refused() == []


def test_a_worker_that_was_away_for_long_comes_back_to_a_collected_stream(
    store: Dated, builder: StreamBuilder, tmp_path: Path
) -> None:
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(6, TIMEOUT)
    builder.train(0.2, steps=4)
    builder.alternate(9)
    builder.train(0.2)
    store.ahead += 1000.0
    assert collect(builder).floor == 9
    worker.restart()
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(11, TIMEOUT)
        assert worker.holds(11)
        assert worker.applied[-1].from_anchor
