"""The subscriber end to end: real stores, real streams, real modules."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkstore.memory import MemoryStore
from chunkstore.posix import PosixStore
from chunkstore.store import Store
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights
from tests.support.streams import StreamBuilder


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
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        assert worker.holds(0)
        for version in range(1, 6):
            builder.train()
            subscriber.wait_for(version, TIMEOUT)
            assert worker.holds(version)
            assert worker.engine.version == version


def test_once_catches_up_in_one_pause_and_returns(builder: StreamBuilder, tmp_path: Path) -> None:
    builder.train(steps=4)
    worker = Worker(tmp_path, builder)
    asyncio.run(worker.subscriber.run(once=True))
    assert worker.holds(4)
