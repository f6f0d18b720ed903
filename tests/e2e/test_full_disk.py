"""Full disks on either side: a typed error says which, nothing is half-written, and all is well once there is room."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chunkstore.errors import StoreFull
from chunkstore.memory import MemoryStore
from chunkstore.metrics import StoreMetrics
from chunkstore.posix import PosixStore
from manifest.errors import LocalDiskError
from manifest.export import export_checkpoint
from manifest.verify import verify_stream
from publisher import share
from publisher.anchors import RoutineAnchors
from publisher.compact import compact
from publisher.config import AnchorConfig
from publisher.publisher import Publisher
from publisher.report import Report
from subscriber import follow, torch_engine
from subscriber.journal import Journal
from tests.publisher.sidecars import WAIT, sidecar_thread, write_config
from tests.publisher.zoo import Zoo, adamw, assert_identical, attach, train
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights, until
from tests.support.crashes import assert_nothing_leaks
from tests.support.disks import DISKS, Disk, small_disk
from tests.support.faults import FaultStore
from tests.support.files import below
from tests.support.streams import StreamBuilder


@pytest.fixture(params=DISKS, ids=lambda kind: kind.__name__.lower())
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with small_disk(request.param, tmp_path / "disk") as disk:
        yield disk


def test_a_store(disk: Disk) -> None:
    store = PosixStore(disk.folder / "store")
    store.put("a/b", b"before" * 1000)
    disk.fill()
    for write in (store.put, store.put_if_absent):
        for key in ("a/b", "a/c", "d/e/f"):
            with pytest.raises(StoreFull, match=f"{write.__name__} file://.*/disk/store/{key}: ") as caught:
                write(key, b"after" * 1000)
            assert caught.value.hint
    assert [info.key for info in store.list_after("")] == ["a/b"]
    assert store.get("a/b", limit=6000) == b"before" * 1000
    assert all(info.key.endswith("/") for info in store.temporaries()), "empty directories at most"
    disk.free()
    assert store.put_if_absent("a/c", b"after" * 1000)
    store.put("a/b", b"after")


@pytest.mark.parametrize("prefix", ["chunks/", "versions/", "alternates/"])
def test_a_publisher_keeps_its_changes(prefix: str, disk: Disk) -> None:
    inner, armed = PosixStore(disk.folder / "store"), False

    def fill(operation: str, key: str) -> None:
        if armed and key.startswith(prefix) and operation.startswith("put"):
            disk.fill()

    store, model = FaultStore(inner, before=fill), Zoo()
    optimizer = adamw(model)
    with attach(model, optimizer, store) as publisher:
        train(model, optimizer, 1)
        armed = True
        handle = publisher.publish(anchor=True)
        if prefix == "alternates/":  # the version itself is there
            commit = handle.result()
            assert commit is not None
            assert not commit.anchored
        else:
            with pytest.raises(StoreFull, match=f"disk/store/{prefix}"):
                handle.result()
        armed = False
        disk.free()
        train(model, optimizer, 2)
        commit = publisher.publish().result()
        assert commit is not None
        assert commit.version == (2 if prefix == "alternates/" else 1)
        assert commit.manifest.stats.unproved_blocks == 0
        assert_identical(publisher, model, inner, commit.version)
    assert_nothing_leaks(disk.folder / "store")


def test_a_publisher_does_not_start(disk: Disk) -> None:
    store, model = PosixStore(disk.folder / "store"), Zoo()
    disk.fill()
    with pytest.raises(StoreFull, match="disk/store/probes/"):
        attach(model, adamw(model), store)
    disk.free()
    with attach(model, adamw(model), store) as publisher:
        assert_identical(publisher, model, store, 0)


def test_a_publisher_process_reports_it_and_goes_on(disk: Disk, tmp_path: Path) -> None:
    store, model, report = PosixStore(disk.folder / "store"), Zoo(), Report(StoreMetrics())
    optimizer = adamw(model)
    config = write_config(tmp_path)
    with sidecar_thread(config, store, report), Publisher.attach(optimizer, model, config) as publisher:
        train(model, optimizer, 1)
        disk.fill()
        with pytest.raises(StoreFull, match="disk/store/chunks/"):
            publisher.publish().result(WAIT)
        error = report.status().last_error
        assert error is not None
        assert error.kind == "store_full"
        assert "garbage collection" in error.hint or "ulimit" in error.hint
        disk.free()
        train(model, optimizer, 2)
        commit = publisher.publish().result(WAIT)
        assert commit is not None
        assert_identical(publisher, model, store, commit.version)
        until(lambda: report.status().last_error is None)


@pytest.mark.parametrize("when", ["state", "layout"])
def test_a_spool_without_room_for_the_state(
    when: str, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, spool, store = Zoo(), disk.folder / "spool", PosixStore(tmp_path / "store")
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace(str(tmp_path / "spool"), str(spool)))
    with sidecar_thread(config, store):
        if when == "state":
            disk.fill()
        else:
            first_fill(disk, monkeypatch, share, "write_layout")
        with pytest.raises(LocalDiskError, match=f"{spool}") as caught:
            Publisher.attach(adamw(model), model, config)
        assert "/dev/shm" in caught.value.hint
        assert sorted(path.name for path in spool.iterdir()) == ["publisher.lock", "publisher.sock"]
        disk.free()
        with Publisher.attach(adamw(model), model, config) as publisher:
            assert_identical(publisher, model, store, 0)


def first_fill(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int = 1
) -> Callable[[], bool]:
    """Fill the disk ahead of a call of `owner.name`. Returns whether that has happened."""
    original, count = getattr(owner, name), 0

    def filling(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == calls:
            disk.fill()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, filling)
    return lambda: count >= calls


@pytest.mark.parametrize("step", ["fetch", "stage", "resolve", "journal before", "journal after"])
def test_a_subscriber_serves_on_and_tells(
    step: str, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder, staging_dir=disk.folder / "staging", state_dir=disk.folder / "state")
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        owner, name, calls = {
            "fetch": (follow, "check_room", 1),
            "stage": (follow, "stage", 1),
            "resolve": (torch_engine, "verify", 1),
            "journal before": (Journal, "write", 1),
            "journal after": (Journal, "write", 2),
        }[step]
        reached = first_fill(disk, monkeypatch, owner, name, calls)
        builder.train()
        until(lambda: reached() and worker.reports(lambda message: "too little room" in message))
        error = subscriber.report.status().last_error
        assert error is not None
        assert (error.kind, error.action) == ("staging_full", "retry")
        assert str(disk.folder) in error.message
        assert error.hint
        written = int(step == "journal after")
        with worker.engine.serving(TIMEOUT) as version:
            assert version == written
            assert worker.holds(written)
        if not step.startswith("journal"):
            until(lambda: not any(p.name.startswith("update-") for p in below(disk.folder / "staging")))
        disk.free()
        subscriber.wait_for(1, TIMEOUT)
        assert worker.holds(1)
        until(lambda: subscriber.report.status().last_error is None)
    left = [path for folder in ("staging", "state") for path in (disk.folder / folder).rglob("*")]
    names = {path.name for path in left if path.is_file()}
    assert names == {"lock", "journal-boot.json"}


def test_scratch_and_export(disk: Disk, tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore(), small_weights())
    builder.train()
    work: list[Callable[[], object]] = [
        lambda: compact(builder.log, 1, 3600.0, scratch=disk.folder),
        lambda: verify_stream(builder.store, disk.folder),
        lambda: export_checkpoint(builder.store, 1, disk.folder / "out"),
    ]
    (disk.folder / "mine").touch()
    disk.fill()
    before = sorted(disk.folder.iterdir())
    for one in work:
        with pytest.raises(LocalDiskError, match=f"{disk.folder}") as caught:
            one()
        assert "space" in caught.value.hint
        assert sorted(disk.folder.iterdir()) == before
    assert builder.log.read_alternate(1) is None
    disk.free()
    for one in work:
        one()
    assert builder.log.read_alternate(1) is not None
    assert sorted(path.name for path in disk.folder.iterdir()) == ["mine", "out"]


def test_routine_anchors_are_tried_again(disk: Disk) -> None:
    builder, report = StreamBuilder(MemoryStore(), small_weights()), Report(StoreMetrics())
    builder.train()
    disk.fill()
    with RoutineAnchors(builder.store, AnchorConfig(every=1, scratch=disk.folder), None, report, look=0.01):
        until(lambda: report.status().last_error is not None)
        error = report.status().last_error
        assert error is not None
        assert error.kind == "local_disk"
        assert "anchors.scratch" in error.hint
        disk.free()
        until(lambda: builder.log.read_alternate(1) is not None)
