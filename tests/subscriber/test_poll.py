"""Looking for versions: which requests are made, and how often."""

import asyncio
import threading
from pathlib import Path

import pytest

from chunkstore.memory import MemoryStore
from chunkstore.metrics import MetricsStore, StoreMetrics
from chunkstore.posix import PosixStore
from manifest.errors import ChainError
from manifest.keys import manifest_key
from manifest.log import VersionLog, open_stream
from subscriber.poll import Poller, Watch, sleep_until
from tests.subscriber.parts import TIMEOUT
from tests.support.streams import StreamBuilder, random_weights

WEIGHTS = random_weights({"w": (8,)})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(steps: int = 0) -> tuple[StreamBuilder, Poller, StoreMetrics, Clock]:
    builder = StreamBuilder(MemoryStore(), WEIGHTS)
    builder.train(steps=steps)
    counts, clock = StoreMetrics(), Clock()
    store = MetricsStore(builder.store, counts)
    poller = Poller(VersionLog(store, open_stream(store)), 1.0, 60.0, clock, lambda: 0.5)
    return builder, poller, counts, clock


def calls(counts: StoreMetrics, operation: str) -> int:
    stats = counts.snapshot().get(operation)
    return 0 if stats is None else stats.calls


def test_no_news_costs_one_head() -> None:
    _, poller, counts, _ = make()
    assert poller.newest(-1) == 0
    assert calls(counts, "list") == 1  # at start
    for _ in range(5):
        assert poller.newest(0) is None
    assert (calls(counts, "head"), calls(counts, "list")) == (5, 1)


def test_news_is_followed_and_many_versions_are_listed() -> None:
    builder, poller, counts, _ = make()
    poller.newest(-1)
    builder.train(steps=2)
    assert poller.newest(0) == 2
    assert calls(counts, "list") == 1
    builder.train(steps=40)
    assert poller.newest(2) == 42
    assert calls(counts, "list") == 2


def test_a_gap_in_the_log_is_not_no_news() -> None:
    """FIELD_REPORTS: prime-rl#3026, Megatron-Bridge#4865: a name that is not visible yet, or not any more."""
    builder, poller, _, clock = make(steps=3)
    poller.newest(-1)
    builder.train(steps=2)
    builder.store.delete("versions/" + f"{4:020d}")
    assert poller.newest(3) is None
    clock.now += 60
    assert poller.newest(3) == 5


def test_what_is_no_manifest_is_passed_over_and_read_again_when_its_turn_comes() -> None:
    builder, poller, _, clock = make(steps=3)
    manifest = builder.store.get(manifest_key(3), limit=1 << 20)
    for version in (3, 90):
        builder.store.put(manifest_key(version), b"garbage")
    assert poller.newest(-1) == 2
    assert sorted(poller.strays) == [3, 90]
    assert manifest_key(90) in str(poller.strays[90])
    assert poller.newest(2) is None
    builder.store.put(manifest_key(3), manifest)
    assert poller.newest(2) == 3
    builder.store.delete(manifest_key(90))
    clock.now += 60
    assert poller.newest(3) is None
    assert poller.strays == {}


def test_a_version_to_avoid_is_passed_over_for_a_while() -> None:
    builder, poller, _, clock = make(steps=9)
    for version in range(5, 9):
        builder.store.delete(manifest_key(version))
    assert poller.newest(-1) == 9
    error = ChainError("a gap")
    poller.avoid(9, error)
    assert poller.newest(-1) == 4
    assert poller.strays == {9: error}
    clock.now += 60
    assert poller.newest(4) == 9
    assert poller.strays == {}


def test_one_listing_reads_a_bounded_number_of_strays() -> None:
    builder, poller, counts, _ = make()
    for version in range(1000, 1150):
        builder.store.put(manifest_key(version), b"garbage")
    before = calls(counts, "get")
    assert poller.newest(-1) is None
    assert calls(counts, "get") - before == 100
    assert poller.newest(-1) == 0  # contiguous ones are found one by one


def test_the_interval_grows_when_nothing_comes_and_shrinks_at_once() -> None:
    builder, poller, _, _ = make()
    poller.newest(-1)
    assert poller.delay() == 1.0
    for _ in range(100):
        poller.newest(0)
    assert poller.delay() == 4.0
    builder.train()
    poller.newest(0)
    assert poller.delay() == 1.0


@pytest.mark.parametrize("draw", [0.0, 0.5, 1.0])
def test_listings_are_not_in_step_either(draw: float) -> None:
    builder = StreamBuilder(MemoryStore(), WEIGHTS)
    counts, clock = StoreMetrics(), Clock()
    store = MetricsStore(builder.store, counts)
    poller = Poller(VersionLog(store, open_stream(store)), 1.0, 60.0, clock, lambda: draw)
    poller.newest(-1)
    clock.now = 60.0 * (0.8 + 0.4 * draw) - 0.001
    poller.newest(0)
    assert calls(counts, "list") == 1
    clock.now += 0.002
    poller.newest(0)
    assert calls(counts, "list") == 2


def test_a_manifest_in_a_local_directory_wakes_the_loop(tmp_path: Path) -> None:
    builder = StreamBuilder(PosixStore(tmp_path / "a stream"), WEIGHTS)
    woken = threading.Event()
    watch = Watch(builder.store.url, woken.set)
    watch.start()
    try:
        builder.train()
        assert woken.wait(TIMEOUT)
    finally:
        watch.stop()


def test_nothing_to_watch_elsewhere() -> None:
    watch = Watch("s3://bucket/prefix", lambda: None)
    watch.start()
    watch.stop()


def test_a_sleep_is_cancelled_even_when_it_is_woken_at_the_same_time() -> None:
    """Or a stop that comes together with a new version would be lost, and waited for in vain."""

    async def wake_and_cancel() -> None:
        wake = asyncio.Event()
        sleeper = asyncio.create_task(sleep_until(wake, TIMEOUT))
        await asyncio.sleep(0)
        wake.set()
        sleeper.cancel()
        await sleeper

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(wake_and_cancel())
