"""What should never happen around a subscriber, and does: stray keys, a replaced stream, local disk that goes away."""

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from chunkstore.memory import MemoryStore
from chunkstore.posix import PosixStore
from chunkstore.store import Store
from manifest.catalog import Catalog, TensorSpec
from manifest.keys import STREAM, manifest_key
from manifest.naming import canonical_tensors
from subscriber.errors import EngineMismatch, StagingUnavailable
from subscriber.torch_names import live_tensors
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights, until
from tests.support.streams import StreamBuilder

RELIST = 0.05  # seconds, so that nobody waits for a minute here


@pytest.fixture
def builder(tmp_path: Path) -> StreamBuilder:
    return StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())


def follow(tmp_path: Path, builder: StreamBuilder) -> Worker:
    return Worker(tmp_path, builder, relist_interval=RELIST)


@pytest.mark.parametrize("name", [f"{100:020d}", "09223372036854775807", "18446744073709551615", "9" * 20])
def test_a_stray_key_hides_no_version_from_a_cold_start(
    name: str, builder: StreamBuilder, tmp_path: Path
) -> None:
    builder.train(steps=4)
    builder.store.put(f"versions/{name}", b"garbage")
    worker = follow(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(4, TIMEOUT)
        assert worker.holds(4)
        until(lambda: worker.refused() == [int(name)])
        assert f"versions/{name}" in worker.status().refused[0].message
        for version in range(5, 10):
            builder.train()
            subscriber.wait_for(version, TIMEOUT)
        assert worker.holds(9)
        until(lambda: worker.refused() == [int(name)])  # not forgotten over the good ones
        builder.store.delete(f"versions/{name}")
        until(lambda: not subscriber.report.status().refused)
        assert subscriber.report.status().last_error is None


def test_a_version_that_no_path_leads_to_hides_none_from_a_cold_start(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    """Real manifests, but the versions before them are gone."""
    builder.train(steps=9)
    for version in range(5, 8):
        builder.store.delete(manifest_key(version))
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(4, TIMEOUT)
        assert worker.holds(4)
        until(lambda: worker.refused() == [8, 9])
        assert "version 9" in worker.status().refused[1].message


def test_a_run_that_ends_after_one_catch_up_passes_over_stray_keys(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    builder.train(steps=2)
    builder.store.put(manifest_key(50), b"garbage")
    worker = follow(tmp_path, builder)
    asyncio.run(worker.subscriber.run(once=True))
    assert worker.holds(2)


def test_a_stray_key_in_the_next_place_is_refused_until_it_is_gone(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    worker = follow(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        builder.store.put(manifest_key(1), b"garbage")
        until(lambda: worker.refused() == [1])
        assert worker.engine.version == 0
        builder.store.delete(manifest_key(1))
        builder.train()
        subscriber.wait_for(1, TIMEOUT)
        assert worker.holds(1)
        until(lambda: not worker.refused())


@pytest.fixture(params=["memory", "posix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return PosixStore(tmp_path / "s") if request.param == "posix" else MemoryStore.named(str(tmp_path))


def wipe(store: Store) -> None:
    """The stream's record first, as a recursive delete may do: the store is never empty for a reader."""
    for key in [STREAM, *(info.key for info in store.list_after(""))]:
        store.delete(key)


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_a_replaced_stream_is_noticed_and_taken_from_its_anchor(
    steps: int, store: Store, tmp_path: Path
) -> None:
    """With fewer, as many and more versions than the old one had."""
    first = StreamBuilder(store, small_weights())
    first.train(steps=3)
    worker = follow(tmp_path, first)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(3, TIMEOUT)
        wipe(store)
        second = StreamBuilder(store, small_weights(seed=9))
        second.train(steps=steps)
        worker.builder = second
        until(lambda: subscriber.report.status().stream == second.log.stream.id.hex())
        until(lambda: subscriber.version == steps)
        assert worker.holds(steps)
        taken = [a for a in worker.applied if a.manifest.stream == second.log.stream.id]
        assert taken[0].from_anchor
        text = subscriber.report.metrics.text().decode()
        assert 'errors_total{kind="foreign_stream"}' in text
        second.train()
        subscriber.wait_for(steps + 1, TIMEOUT)
        until(lambda: subscriber.report.status().last_error is None)


def test_a_replaced_stream_without_versions_leaves_the_engine_held(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    worker = follow(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        record = StreamBuilder(MemoryStore(), small_weights()).store.get(STREAM, limit=4096)
        wipe(builder.store)
        builder.store.put(STREAM, record)
        until(lambda: worker.engine.version is None)
        assert not subscriber.report.ready
        assert f"{STREAM} is now stream" in (subscriber.report.reason or "")
        assert worker.reports(lambda message: f"{STREAM} is now stream" in message)


@pytest.mark.parametrize("how", ["missing", "unreadable"])
def test_a_stream_record_that_is_gone_for_a_while_is_reported_and_nothing_stops(
    how: str, builder: StreamBuilder, tmp_path: Path
) -> None:
    worker = follow(tmp_path, builder)
    record = builder.store.get(STREAM, limit=4096)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        if how == "missing":
            builder.store.delete(STREAM)
        else:
            builder.store.put(STREAM, record[:-1])
        until(lambda: worker.reports(lambda message: STREAM in message))
        assert subscriber.report.ready
        builder.train()
        subscriber.wait_for(1, TIMEOUT)
        assert worker.holds(1)
        builder.store.put(STREAM, record)
        until(lambda: subscriber.report.status().last_error is None)


def test_a_store_that_is_not_mounted_is_told_and_not_written_to(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    builder = StreamBuilder(PosixStore(root), small_weights())
    worker = Worker(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        for _ in range(2):
            root.rename(elsewhere)
            until(lambda: worker.reports(lambda message: f"{root.as_uri()} is not there any more" in message))
            assert subscriber.report.ready
            elsewhere.rename(root)
            until(lambda: subscriber.report.status().last_error is None)
        root.rename(elsewhere)
    assert not root.exists()  # its last word would have made it
    worker.restart()
    with running(worker.subscriber):
        until(lambda: worker.reports(lambda message: message == f"{root.as_uri()} is not there"))
    assert not root.exists()
    elsewhere.rename(root)
    builder.train()
    worker.restart()
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(1, TIMEOUT)
    assert worker.holds(1)


@pytest.mark.parametrize("which", ["staging_path", "state_path"])
def test_a_local_directory_that_somebody_removes_is_made_again(
    which: str, builder: StreamBuilder, tmp_path: Path
) -> None:
    worker = follow(tmp_path, builder)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        shutil.rmtree(getattr(worker.config, which))
        builder.train()
        subscriber.wait_for(1, TIMEOUT)
        assert worker.holds(1)


def test_a_staging_directory_that_cannot_be_used_is_named_and_tried_again(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "staging"
    worker = Worker(tmp_path, builder, staging_dir=in_the_way)
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        shutil.rmtree(in_the_way)
        in_the_way.touch()
        builder.train()
        until(lambda: worker.reports(lambda message: f"{in_the_way}" in message))
        assert worker.engine.version == 0
        assert subscriber.report.ready
        in_the_way.unlink()
        subscriber.wait_for(1, TIMEOUT)
        assert worker.holds(1)


def test_a_state_directory_that_cannot_be_made_ends_the_run_by_name(
    builder: StreamBuilder, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    worker = Worker(tmp_path, builder, state_dir=tmp_path / "file")
    with pytest.raises(StagingUnavailable, match="file/worker cannot be used"):
        asyncio.run(worker.subscriber.run())


class Turned(nn.Module):
    """`b` is a view of the memory of `a`."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, 4))
        self.b = nn.Parameter(self.a.detach().t() if turned else self.a.detach())


def test_an_alias_that_is_the_transposed_tensor_is_refused() -> None:
    """The same memory under both names, so no write can give them the same values."""
    catalog = Catalog.of([TensorSpec("a", "F32", (4, 4))], {"b": "a"})
    assert len(live_tensors(canonical_tensors(Turned(turned=False)), catalog)[0].copies) == 1
    with pytest.raises(EngineMismatch, match=r"'b' is 'a' in another layout of the same memory"):
        live_tensors(canonical_tensors(Turned(turned=True)), catalog)
