"""One daemon for several engines: what they share is fetched once, and none of them holds up another."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from chunkstore import memory
from chunkstore.posix import PosixStore
from manifest.keys import CHUNKS, status_key
from manifest.lease import MAX_STATUS_BYTES
from subscriber.daemon import Subscriber
from subscriber.engine import Prepared, Scattered
from subscriber.errors import EngineFailed, SubscriberBusy
from subscriber.fleet import Fleet
from subscriber.journal import Journal
from subscriber.report import AppliedVersion
from subscriber.status import SubscriberStatus
from tests.subscriber.parts import (
    MIXED,
    SHAPES,
    TIMEOUT,
    CountingStore,
    RemoteEngine,
    differing,
    make_config,
    running,
    small_weights,
    until,
)
from tests.subscriber.shared_worker import BOOT_ID, fleet_for, run_once
from tests.support.crashes import dies_at
from tests.support.streams import StreamBuilder

NAMES = ("a", "b", "c")


class World:
    """A stream of two versions in a store that counts, and a fleet of three."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = CountingStore(str(folder))
        monkeypatch.setitem(memory._named, str(folder), self.store)
        self.builder = StreamBuilder(self.store, small_weights())
        self.builder.train()
        self.store.reads.clear()
        self.config = make_config(folder, self.builder)
        self.engines = {name: RemoteEngine(self.builder) for name in NAMES}
        self.applied: list[tuple[str, AppliedVersion]] = []
        self.start()

    def start(self) -> None:
        """A new daemon over the same engines."""
        self.fleet = Fleet(self.config, self.engines, lambda *applied: self.applied.append(applied))

    def holds(self, name: str, version: int) -> bool:
        module = self.engines[name].module
        return self.fleet.versions[name] == version and not differing(module, self.builder.weights[version])

    def published(self, name: str) -> SubscriberStatus:
        """The status object of one."""
        data = self.store.get(status_key(f"worker.{name}"), limit=MAX_STATUS_BYTES)
        return SubscriberStatus.model_validate_json(data)

    def chunk_reads(self) -> set[int]:
        """How often the chunks that were read at all were read."""
        return {count for key, count in self.store.reads.items() if key.startswith(CHUNKS)}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_every_chunk_is_read_once_for_all(world: World) -> None:
    with running(world.fleet) as fleet:
        fleet.wait_for(1, TIMEOUT)
        for pace in (1, 1, 3, 2, 1):
            world.builder.train(steps=pace)
            fleet.wait_for(world.builder.version, TIMEOUT)
        assert not list((world.config.staging_path / "chunks").iterdir())
    assert all(world.holds(name, 9) for name in NAMES)
    assert world.chunk_reads() == {1}
    fetched = sum(report.metrics.fetched_bytes._value.get() for report in fleet.reports.values())
    assert fetched == sum(manifest.nbytes for manifest in world.builder.manifests)


def test_each_has_its_own_status_object_journal_and_staging(world: World, tmp_path: Path) -> None:
    with running(world.fleet) as fleet:
        fleet.wait_for(1, TIMEOUT)
        until(lambda: all(world.published(name).applied_version == 1 for name in NAMES))
        assert {world.published(name).id for name in NAMES} == {"worker.a", "worker.b", "worker.c"}
        assert all(world.published(name).boot_id == "life-1" for name in NAMES)
    state = tmp_path / "state"
    files = {str(path.relative_to(state)) for path in state.rglob("*.json")}
    assert files == {f"worker/servers/{name}/journal-life-1.json" for name in NAMES}
    assert {path.name for path in (state / "staging" / "worker").iterdir()} == {"chunks", "servers"}
    assert [path.name for path in (state / "worker").iterdir() if path.is_file()] == ["lock"]
    assert {world.published(name).state for name in NAMES} == {"stopped"}


def test_a_fleet_of_one_is_a_subscriber(world: World, tmp_path: Path) -> None:
    with running(Fleet(world.config, {"a": world.engines["a"]})) as fleet:
        fleet.wait_for(1, TIMEOUT)
    assert {info.key for info in world.store.list_after("subscribers/")} == {status_key("worker")}
    state = tmp_path / "state"
    journals = [str(path.relative_to(state)) for path in state.rglob("*.json")]
    assert journals == ["worker/journal-life-1.json"]
    assert not list((state / "staging" / "worker" / "chunks").iterdir())
    # The same files: a Subscriber goes on where it ended.
    with running(Subscriber(world.config, world.engines["a"])) as subscriber:
        subscriber.wait_for(1, TIMEOUT)
    assert not subscriber.report.timeline()


def test_one_that_is_not_there_holds_up_no_other(world: World) -> None:
    world.engines["b"].gone = EngineFailed("connection refused", hint="start it")
    with running(world.fleet) as fleet:
        for version in range(1, 4):
            until(lambda: world.holds("a", version) and world.holds("c", version))  # noqa: B023
            world.builder.train()
        with pytest.raises(TimeoutError, match=r"by worker\.b: .*engine_failed: connection refused"):
            fleet.wait_for(1, 0.01)
        assert world.published("b").last_error is not None
        assert world.published("b").state == "held"
        world.engines["b"].gone = None
        fleet.wait_for(4, TIMEOUT)
        assert all(world.holds(name, 4) for name in NAMES)
    assert world.chunk_reads() == {1}


def test_one_that_is_stuck_holds_up_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while it writes; it then goes to the newest version at once, with what the others have fetched."""
    reached, go_on = threading.Event(), threading.Event()
    original = RemoteEngine._scatter

    def stuck(self: RemoteEngine, prepared: Prepared) -> Scattered:
        if self is world.engines["b"] and prepared.staged.target.version == 2:
            reached.set()
            assert go_on.wait(TIMEOUT)
        return original(self, prepared)

    monkeypatch.setattr(RemoteEngine, "_scatter", stuck)
    with running(world.fleet) as fleet:
        fleet.wait_for(1, TIMEOUT)
        world.builder.train()
        assert reached.wait(TIMEOUT)
        for version in range(3, 6):
            world.builder.train()
            until(lambda: world.holds("a", version) and world.holds("c", version))  # noqa: B023
        assert fleet.versions["b"] == 1
        go_on.set()
        fleet.wait_for(5, TIMEOUT)
    assert [applied.version for name, applied in world.applied if name == "b"] == [1, 2, 5]
    assert world.holds("b", 5)
    assert world.chunk_reads() == {1}


def test_one_that_restarts_is_brought_back_by_itself(world: World) -> None:
    with running(world.fleet) as fleet:
        fleet.wait_for(1, TIMEOUT)
        world.engines["b"].restart()
        until(lambda: fleet.reports["b"].status().boot_id == "life-2" and world.holds("b", 1))
        until(lambda: len(world.applied) == 4)
    assert [applied.version for name, applied in world.applied if name != "b"] == [1, 1]
    assert all(world.holds(name, 1) for name in NAMES)


def test_log_lines_name_the_server(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deltasync.subscriber"):
        asyncio.run(world.fleet.run(once=True))
        Subscriber(world.config, world.engines["a"]).report.held("nothing")
    lines = [record.message for record in caplog.records]
    for name in NAMES:
        assert any(line.startswith(f"applied server={name} version=1 ") for line in lines)
    assert lines[-1] == "held reason=nothing"


def test_until_version_ends_when_all_are_there(world: World) -> None:
    world.engines["b"].gone = EngineFailed("connection refused", hint="start it")

    async def serve() -> None:
        running = asyncio.create_task(world.fleet.run(until_version=1))
        while not (world.holds("a", 1) and world.holds("c", 1)) or world.fleet.reports["c"].ready:
            await asyncio.sleep(0)
        assert not running.done()
        world.engines["b"].gone = None
        await running

    asyncio.run(serve())
    assert all(world.holds(name, 1) for name in NAMES)


@pytest.mark.parametrize("broken", ["a", "c"])
def test_once_raises_when_the_others_are_done(broken: str, world: World) -> None:
    world.engines[broken].gone = EngineFailed("connection refused", hint="start it")
    with pytest.raises(EngineFailed, match="connection refused"):
        asyncio.run(world.fleet.run(once=True))
    assert [world.holds(name, 1) for name in NAMES] == [name != broken for name in NAMES]


def test_an_error_in_on_applied_ends_the_run_of_all(world: World) -> None:
    def broken(name: str, applied: AppliedVersion) -> None:
        if name == "b":
            raise ZeroDivisionError(name)

    with running(Fleet(world.config, world.engines, broken)) as fleet, pytest.raises(ZeroDivisionError):
        fleet.wait_for(2, TIMEOUT)
    assert {world.published(name).state for name in NAMES} == {"stopped"}


def test_stop_completes_what_was_begun_and_stops_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    original = RemoteEngine._scatter

    def stuck(self: RemoteEngine, prepared: Prepared) -> Scattered:
        if self is world.engines["b"]:
            reached.set()
            assert go_on.wait(TIMEOUT)
        return original(self, prepared)

    monkeypatch.setattr(RemoteEngine, "_scatter", stuck)
    world.engines["c"].gone = EngineFailed("connection refused", hint="start it")
    with running(world.fleet) as fleet:
        assert reached.wait(TIMEOUT)
        stopping = threading.Thread(target=fleet.stop)
        stopping.start()
        until(lambda: [fleet.reports[name].status().state for name in "ac"] == ["stopped"] * 2)
        assert stopping.is_alive()
        go_on.set()
        stopping.join(TIMEOUT)
        assert not stopping.is_alive()
    assert not differing(world.engines["b"].module, world.builder.weights[1])
    assert {world.published(name).state for name in NAMES} == {"stopped"}


def test_one_daemon_per_id(world: World) -> None:
    with running(world.fleet) as fleet:
        fleet.wait_for(1, TIMEOUT)
        with pytest.raises(SubscriberBusy):
            asyncio.run(Fleet(world.config, world.engines).run())
        with pytest.raises(SubscriberBusy):
            asyncio.run(Subscriber(world.config, world.engines["a"]).run())


@pytest.mark.parametrize("names", [(), ("a", ".."), ("a", "b/c"), ("a", "")])
def test_names_must_be_file_names(names: tuple[str, ...], world: World) -> None:
    with pytest.raises(ValueError, match="names"):
        Fleet(world.config, dict.fromkeys(names, world.engines["a"]))


@pytest.mark.parametrize(
    "point",
    [
        "subscriber.after_fetch",
        "subscriber.before_scatter",
        "subscriber.mid_scatter:2",
        "subscriber.mid_scatter:8",
        "subscriber.before_record",
        "subscriber.after_record",
    ],
)
def test_killed_with_both_journals_kept(point: str, tmp_path: Path) -> None:
    """Wherever the process dies, each engine is finished from its own journal and staged values, not from an anchor."""
    builder = StreamBuilder(PosixStore(tmp_path / "store"), small_weights())
    options: dict[str, Any] = {
        "weights": str(tmp_path / "weights"),
        "store": str(tmp_path / "store"),
        "state": str(tmp_path / "state"),
        "shapes": SHAPES,
        "dtypes": MIXED,
        "names": ["a", "b"],
    }
    asyncio.run(fleet_for(options)[1].run(once=True))
    builder.train(steps=2)
    dies_at(point, run_once, options)
    for name in options["names"]:
        journal = Journal(tmp_path / "state" / "worker" / "servers" / name)
        journal.begin(BOOT_ID)
        entry = journal.read()
        assert entry is not None
        assert entry.applied is not None
    modules, fleet = fleet_for(options)
    asyncio.run(fleet.run(once=True))
    for name, module in modules.items():
        assert not differing(module, builder.weights[2])
        assert not any(applied.from_anchor for applied in fleet.reports[name].timeline())
