"""Cold starts at any time: beside a publisher, garbage collection and compaction that never rest, or die midway."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from chunkstore.errors import ObjectMissing
from chunkstore.memory import MemoryStore
from chunkstore.posix import PosixStore
from manifest.collect import delete_garbage, read_holdings
from manifest.errors import LocalDiskError
from manifest.export import export_checkpoint
from manifest.gc import Policy, Reason, collectable
from manifest.verify import verify_stream
from publisher.compact import compact
from publisher.errors import CompactionLate
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights, until
from tests.support.crashes import DAY, age, assert_nothing_leaks, command, dies_at, succeeds
from tests.support.faults import FaultStore
from tests.support.streams import StreamBuilder

GRACE = 1.0


@contextmanager
def restless(*work: Callable[[], None]) -> Iterator[None]:
    """Each of `work` again and again on a thread of its own, while the block runs. Raises what one of them raised."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def run(once: Callable[[], None]) -> None:
        try:
            while not stop.wait(0.01):  # or those that spin keep the others from the interpreter
                once()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(once,)) for once in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT)
    if failures:
        raise failures[0]


class Keepers:
    """What runs beside the subscribers of `builder`'s stream, which never gets far ahead of its newest anchor.

    On a busy machine compaction gives up when it took too long; the trainer then waits for it, so that
    garbage collection always comes to have something to delete.
    """

    def __init__(self, builder: StreamBuilder) -> None:
        self.builder = builder
        self.anchored = 0
        self.superseded = 0

    def train(self) -> None:
        if self.builder.version < self.anchored + 20:
            self.builder.train(0.05)

    def wait_for_deletions(self) -> None:
        """Return once garbage collection has followed the stream further."""
        deleted = self.superseded
        until(lambda: self.superseded > deleted)

    def collect(self) -> None:
        policy = Policy(GRACE)
        garbage = collectable(read_holdings(self.builder.log, policy), policy)
        delete_garbage(self.builder.store, garbage.objects)
        self.superseded += sum(one.reason is Reason.SUPERSEDED for one in garbage.objects)

    def compact(self) -> None:
        # A version whose objects went meanwhile, or that took too long on a busy machine, is the next one's turn.
        with suppress(CompactionLate, ObjectMissing):
            version = self.builder.version
            if version > self.anchored:
                compact(self.builder.log, version, GRACE)
                self.anchored = version


def test_cold_starts_beside_everything_else(tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights(), per_chunk=1)
    keepers = Keepers(builder)
    with restless(keepers.train, keepers.collect, keepers.compact):
        until(lambda: keepers.superseded > 0)
        for number in range(6):
            wanted = builder.version
            worker = Worker(tmp_path, builder, id=f"worker-{number}", status_interval=0.05)
            asyncio.run(asyncio.wait_for(worker.subscriber.run(until_version=wanted), TIMEOUT))
            reached = worker.applied[-1].version
            assert reached >= wanted
            assert worker.applied[0].from_anchor
            assert worker.holds(reached)
            if number < 2:
                keepers.wait_for_deletions()
    keepers.collect()
    report = verify_stream(builder.store)
    assert report.problems == ()
    assert report.unverified == ()
    assert report.collected


def test_one_that_follows_is_never_left_behind(tmp_path: Path) -> None:
    """It is stopped and started again, with other weights, while everything else goes on."""
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights(), per_chunk=1)
    keepers = Keepers(builder)
    worker = Worker(tmp_path, builder, status_interval=0.05)
    with restless(keepers.train, keepers.collect, keepers.compact):
        until(lambda: keepers.superseded > 0)
        for _ in range(3):
            with running(worker.subscriber) as subscriber:
                subscriber.wait_for(builder.version, TIMEOUT)
                keepers.wait_for_deletions()
                subscriber.wait_for(builder.version, TIMEOUT)
            assert worker.holds(worker.applied[-1].version)
            worker.restart()


GC = [
    "probe.before_delete",
    "gc.before_delete:1",
    "gc.before_delete:2",
    "gc.before_delete:4",
    "chunkstore.posix.before_unlink:3",
    "chunkstore.posix.after_unlink:3",
    "gc.after_delete:3",
]
COMPACT = [
    "publisher.before_chunk",
    "publisher.after_chunk",
    "publisher.after_chunks",
    "compact.before_anchor",
    "compact.after_anchor",
]
EXPORT = ["export.before_rename", "export.after_rename"]


@pytest.mark.parametrize(
    ("name", "point"), [("gc", p) for p in GC] + [("compact", p) for p in COMPACT] + [("export", p) for p in EXPORT]
)  # fmt: skip
def test_whichever_is_killed_readers_go_on_and_a_second_run_leaves_nothing(
    name: str, point: str, tmp_path: Path
) -> None:
    store, scratch = tmp_path / "store", tmp_path / "scratch"
    scratch.mkdir()
    builder = StreamBuilder(PosixStore(store), small_weights(), per_chunk=1)
    builder.train(0.3, steps=3)
    builder.alternate(2)
    age(store, 2 * DAY)
    more = {"compact": ["--scratch", str(scratch)], "export": [str(scratch / "out")], "gc": []}[name]
    dies_at(point, command, "store", name, str(store), *more)
    Worker(tmp_path, builder).check_cold_start(3)
    if point != "export.after_rename":
        succeeds(command, "store", name, str(store), *more)
    Worker(tmp_path, builder, id="late").check_cold_start(3)
    assert [path.name for path in scratch.rglob("*")] == (
        ["out", "model.safetensors"] if name == "export" else []
    )
    assert_nothing_leaks(store)


def test_an_export_that_was_killed_among_its_files_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    """Into a folder that exists they are moved one by one; what is there then is named, and never mixed."""
    builder = StreamBuilder(PosixStore(tmp_path / "store"), small_weights())
    out = tmp_path / "out"
    out.mkdir()
    dies_at("export.mid_move", command, "store", "export", builder.store.url, str(out))
    with pytest.raises(LocalDiskError) as caught:
        export_checkpoint(builder.store, 0, out)
    assert "interrupted: empty it" in caught.value.hint
    for path in out.glob("*.safetensors"):
        path.unlink()
    export_checkpoint(builder.store, 0, out)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_two_exports_to_one_place_do_not_mix(tmp_path: Path) -> None:
    builder = StreamBuilder(PosixStore(tmp_path / "store"), small_weights())

    def race(operation: str, key: str) -> None:
        if operation == "get" and key.startswith("chunks/"):
            with pytest.raises(LocalDiskError, match="another export is writing"):
                export_checkpoint(builder.store, 0, tmp_path / "out")

    export_checkpoint(FaultStore(builder.store, before=race), 0, tmp_path / "out")
    assert [path.name for path in tmp_path.glob("*out*")] == ["out"]
