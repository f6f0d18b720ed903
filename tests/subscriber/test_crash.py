"""kill −9 at every named point; the weights live on in shared memory, and a restart ends bit-identical."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from chunkstore.posix import PosixStore
from subscriber.daemon import Subscriber
from tests.subscriber.parts import MIXED, SHAPES, differing, small_weights
from tests.subscriber.shared_worker import BOOT_ID, run_once, subscriber_for
from tests.support.crashes import assert_nothing_leaks, dies_at
from tests.support.streams import StreamBuilder

BEFORE = (
    "subscriber.before_fetched",
    "subscriber.after_fetched",
    "subscriber.after_fetch",
    "subscriber.mid_stage",
    "subscriber.after_stage",
    "journal.before_rename:2",
)
BEGUN = ("journal.after_rename:2", "subscriber.before_scatter")
HALF_WRITTEN = ("subscriber.mid_scatter", "subscriber.mid_scatter:4")
WRITTEN = (
    "subscriber.before_record",
    "journal.before_rename:3",
    "journal.after_rename:3",
    "subscriber.after_record",
    "subscriber.mid_sweep",
)


class World:
    """A stream, a file with the live weights, and the subscriber's files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.builder = StreamBuilder(PosixStore(folder / "store"), small_weights())
        self.options: dict[str, Any] = {
            "weights": str(folder / "weights"),
            "store": str(folder / "store"),
            "state": str(folder / "state"),
            "shapes": SHAPES,
            "dtypes": MIXED,
        }

    def run_and_die(self, point: str) -> None:
        """One run in a process of its own that is killed at `point`."""
        dies_at(point, run_once, self.options)

    def run(self) -> Subscriber:
        """One run, here, until everything is caught up with."""
        _, subscriber = subscriber_for(self.options)
        asyncio.run(subscriber.run(once=True))
        self.check_nothing_is_left(subscriber)
        return subscriber

    def check_nothing_is_left(self, subscriber: Subscriber) -> None:
        """Of all that it wrote, here and into the store, only what it needs."""
        state, staging = subscriber.config.state_path, subscriber.config.staging_path
        journal = f"journal-{BOOT_ID}.json"
        assert {path.name for path in state.iterdir()} - {"staging"} == {"lock", journal}
        assert [path for path in staging.rglob("*") if path.name != "chunks"] == []
        assert_nothing_leaks(self.folder / "store")

    def holds(self, version: int) -> bool:
        module, _ = subscriber_for(self.options)
        return not differing(module, self.builder.weights[version])


@pytest.mark.parametrize("point", BEFORE + BEGUN + HALF_WRITTEN + WRITTEN)
def test_killed_while_applying_a_chain_then_restarted(point: str, tmp_path: Path) -> None:
    """FIELD_REPORTS: SkyRL#1902: every retry after a crash in the middle must heal, not alternate."""
    world = World(tmp_path)
    world.run()
    assert world.holds(0)
    world.builder.train(steps=3)
    world.run_and_die(point)
    assert world.holds(3) == (point in WRITTEN)
    assert world.holds(0) == (point in BEFORE + BEGUN)
    subscriber = world.run()
    assert world.holds(3)
    # What was begun is finished from its staged values; what was not is done again. Neither takes an anchor.
    applied = [(applied.version, applied.from_anchor) for applied in subscriber.report.timeline()]
    assert applied == ([(3, False)] if point in BEFORE else [])


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", ["subscriber.before_status", "subscriber.after_status"])
def test_killed_while_it_renews_its_lease(point: str, nth: int, tmp_path: Path) -> None:
    """Whenever that is, beside everything else."""
    world = World(tmp_path)
    world.builder.train(steps=3)
    world.run_and_die(f"{point}:{nth}")
    world.run()
    assert world.holds(3)


@pytest.mark.parametrize(
    "point", ["journal.mid_begin", "subscriber.before_hold", "subscriber.after_hold", "journal.before_rename"]
)
def test_killed_where_what_is_live_is_found_to_be_no_version(point: str, tmp_path: Path) -> None:
    """Somebody has written the weights while no subscriber ran; a journal of an earlier life lies there as well."""
    world = World(tmp_path)
    world.run()
    weights = Path(world.options["weights"])
    weights.write_bytes(bytes(weights.stat().st_size))
    for name in ("journal-before.json", "journal-before.tmp", "reached.tmp"):
        (tmp_path / "state" / "worker" / name).touch()
    world.run_and_die(point)
    subscriber = world.run()
    assert world.holds(0)
    assert [applied.from_anchor for applied in subscriber.report.timeline()] == [True]


@pytest.mark.parametrize("again", [False, True])
def test_half_written_and_the_staged_values_are_gone(again: bool, tmp_path: Path) -> None:
    """Only an anchor can heal that; even a second crash in the middle of the repair does not matter."""
    world = World(tmp_path)
    world.run()
    world.builder.train(steps=2)
    world.run_and_die("subscriber.mid_scatter:3")
    shutil.rmtree(tmp_path / "state" / "staging")
    if again:
        world.run_and_die("subscriber.mid_scatter:2")
        assert not any(world.holds(version) for version in range(3))
    subscriber = world.run()
    assert world.holds(2)
    # The second time the staged values of the repair itself are still there, and are written again.
    assert [applied.from_anchor for applied in subscriber.report.timeline()] == ([] if again else [True])


def test_a_staged_value_was_damaged_after_the_crash(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run()
    world.builder.train()
    world.run_and_die("subscriber.mid_scatter:3")
    (values,) = (tmp_path / "state").glob("staging/worker/update-*/resolved/values.bin")
    data = bytearray(values.read_bytes())
    data[len(data) // 2] ^= 1
    values.write_bytes(data)
    subscriber = world.run()
    assert world.holds(1)
    assert subscriber.report.timeline()[0].from_anchor


def test_killed_in_the_first_cold_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run_and_die("subscriber.mid_scatter:2")
    world.run()
    assert world.holds(0)
