"""Retry, concurrency limit and metrics around a store that fails on purpose."""

import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkstore.errors import (
    AccessDenied,
    CorruptObject,
    CredentialsExpired,
    ObjectMissing,
    StoreFull,
    StoreUnavailable,
)
from chunkstore.limit import LimitStore
from chunkstore.memory import MemoryStore
from chunkstore.metrics import MetricsStore, OperationStats, StoreMetrics
from chunkstore.retry import Backoff, RetryStore
from chunkstore.store import Store
from tests.support.faults import Fault, FaultStore


class Time:
    """A clock that only moves when someone sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def failing(times: int, error: Exception | None = None) -> Fault:
    """Fail the first `times` calls."""
    left = iter(range(times))
    return lambda operation, key: (error or StoreUnavailable("503")) if next(left, None) is not None else None


def retrying(
    inner: Store, time: Time, *, first: float = 1.0, longest: float = 8.0, deadline: float = 60.0
) -> RetryStore:
    backoff = Backoff(first, longest, deadline, clock=time.clock, sleep=time.sleep, uniform=lambda: 1.0)
    return RetryStore(inner, backoff)


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("k", limit=10),
    "get_range": lambda store: store.get_range("k", 0, 1),
    "head": lambda store: store.head("k"),
    "put": lambda store: store.put("k", b"new"),
    "list": lambda store: list(store.list_after("")),
    "delete": lambda store: store.delete("k"),
}


@pytest.fixture
def memory() -> MemoryStore:
    store = MemoryStore()
    store.put("k", b"data")
    return store


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_passing_fault_is_repeated_until_it_has_passed(
    memory: MemoryStore, operation: str, when: str
) -> None:
    if (operation, when) == ("list", "after"):
        when = "before"  # a listing has no reply of its own to lose
    time = Time()
    flaky = (
        FaultStore(memory, before=failing(3)) if when == "before" else FaultStore(memory, after=failing(3))
    )
    expected = OPERATIONS[operation](memory) if operation not in ("put", "delete") else None
    assert OPERATIONS[operation](retrying(flaky, time)) == expected
    assert time.slept == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_put_if_absent_is_never_repeated(memory: MemoryStore, when: str) -> None:
    """FIELD_REPORTS: aws-sdk-java-v2#6580, hudi#14373: a repeat would answer False to its own success."""
    time, asked = Time(), []

    def fault(operation: str, key: str) -> Exception:
        asked.append(operation)
        return StoreUnavailable("lost")

    flaky = FaultStore(memory, before=fault) if when == "before" else FaultStore(memory, after=fault)
    with pytest.raises(StoreUnavailable):
        retrying(flaky, time).put_if_absent("new", b"")
    assert (asked, time.slept) == (["put_if_absent"], [])
    assert (memory.head("new") is None) == (when == "before")


@pytest.mark.parametrize("error", [ObjectMissing, AccessDenied, StoreFull, CorruptObject])
def test_what_will_not_pass_by_itself_is_not_repeated(memory: MemoryStore, error: type[StoreFull]) -> None:
    time = Time()
    with pytest.raises(error):
        retrying(FaultStore(memory, before=failing(1, error("no"))), time).get("k", limit=10)
    assert time.slept == []


def test_retrying_ends_at_the_deadline_with_the_last_error(memory: MemoryStore) -> None:
    time = Time()
    store = retrying(FaultStore(memory, before=failing(10**6)), time, first=1, longest=4, deadline=20)
    with pytest.raises(StoreUnavailable):
        store.get("k", limit=10)
    assert time.slept == [1, 2, 4, 4, 4, 4]  # 19 seconds; a further 4 would end after the deadline
    with pytest.raises(StoreUnavailable):
        list(store.list_after(""))
    assert sum(time.slept) == 38


@given(st.integers(0, 5000), st.floats(0.001, 10), st.floats(0.001, 100), st.randoms(use_true_random=False))
def test_jitter_is_full_and_bounded(retry: int, first: float, longest: float, uniform: random.Random) -> None:
    backoff = Backoff(first, longest, deadline=1e9, clock=lambda: 0.0, uniform=uniform.random)
    seconds = backoff.wait(retry, began=0.0)
    assert seconds is not None
    assert 0 <= seconds <= min(longest, first * 2 ** min(retry, 60))
    assert Backoff(first, longest, 1e9, clock=lambda: 0.0, uniform=lambda: 0.0).wait(retry, 0.0) == 0.0


def test_an_interrupted_listing_goes_on_where_it_was() -> None:
    memory, time = MemoryStore(), Time()
    for number in range(20):
        memory.put(f"{number:02}", b"")
    seen: list[str] = []

    def fault(operation: str, key: str) -> Exception | None:
        seen.append(key)
        return StoreUnavailable("cut") if seen.count(key) < 3 and int(key) % 5 == 2 else None

    listed = list(retrying(FaultStore(memory, before=fault), time, deadline=4).list_after(""))
    assert [info.key for info in listed] == [f"{number:02}" for number in range(20)]
    # Every fault begins anew, at one second and with the whole deadline, because there was progress in between.
    assert time.slept == [1.0, 2.0] * 4
    assert len(seen) == 20 + 8


def test_the_limit_holds_for_operations_and_listings() -> None:
    running = threading.Semaphore(0)
    release = threading.Event()
    lock = threading.Lock()
    now, peak = 0, 0

    def enter(operation: str, key: str) -> None:
        nonlocal now, peak
        with lock:
            now += 1
            peak = max(peak, now)
        running.release()
        assert release.wait(30)
        with lock:
            now -= 1

    memory = MemoryStore()
    memory.put("k", b"data")
    store = LimitStore(FaultStore(memory, before=enter), 3)
    calls = [call for name, call in OPERATIONS.items() if name != "delete"] * 2
    threads = [threading.Thread(target=call, args=(store,)) for call in calls]
    for thread in threads:
        thread.start()
    for _ in range(3):
        assert running.acquire(timeout=30)
    assert not running.acquire(timeout=0.1), "a fourth operation began"
    release.set()
    for thread in threads:
        thread.join(30)
    assert peak == 3


def test_a_slow_consumer_of_a_listing_holds_no_slot(memory: MemoryStore) -> None:
    store = LimitStore(memory, 1)
    memory.put("k2", b"")
    for info in store.list_after(""):
        assert store.head(info.key) is not None


def test_a_failed_operation_gives_its_slot_back(memory: MemoryStore) -> None:
    store = LimitStore(memory, 1)
    for _ in range(3):
        with pytest.raises(ObjectMissing):
            store.get("gone", limit=1)
    assert store.get("k", limit=10) == b"data"


def test_metrics_count_calls_bytes_seconds_errors_and_retries(memory: MemoryStore) -> None:
    """FIELD_REPORTS: s3fs#632, botocore#3117: renewed credentials are visible in metrics."""
    time, metrics = Time(), StoreMetrics()
    flaky = FaultStore(memory, before=failing(2, CredentialsExpired("token")))
    backoff = Backoff(1.0, clock=time.clock, sleep=time.sleep, uniform=lambda: 1.0)
    store = MetricsStore(RetryStore(flaky, backoff, on_retry=metrics.retried), metrics, clock=time.clock)
    assert metrics.snapshot() == {}

    assert store.get("k", limit=10) == b"data"
    with pytest.raises(ObjectMissing):
        store.get("gone", limit=10)
    assert store.get_range("k", 1, 2) == b"at"
    store.put("k2", memoryview(b"abcd").cast("H"))
    assert store.put_if_absent("k3", b"abc")
    assert not store.put_if_absent("k3", b"abc")
    assert [info.key for info in store.list_after("")] == ["k", "k2", "k3"]
    store.delete("k3")
    before = metrics.snapshot()
    store.head("k")

    assert before == {
        "get": OperationStats(2, 3.0, 4, 0, {"object_missing": 1}, {"credentials_expired": 2}),
        "get_range": OperationStats(1, 0.0, 2, 0, {}, {}),
        "put": OperationStats(1, 0.0, 0, 4, {}, {}),
        "put_if_absent": OperationStats(2, 0.0, 0, 3, {}, {}),
        "list": OperationStats(1, 0.0, 0, 0, {}, {}),
        "delete": OperationStats(1, 0.0, 0, 0, {}, {}),
    }
    assert metrics.snapshot()["head"].calls == 1


def test_a_failed_or_abandoned_listing_is_counted_once(memory: MemoryStore) -> None:
    metrics = StoreMetrics()
    memory.put("k2", b"")
    broken = MetricsStore(FaultStore(memory, before=failing(1, AccessDenied("no"))), metrics)
    with pytest.raises(AccessDenied):
        list(broken.list_after(""))
    assert metrics.snapshot()["list"].errors == {"access_denied": 1}
    listing = MetricsStore(memory, metrics).list_after("")
    next(listing)
    del listing
    assert metrics.snapshot()["list"].calls == 2


def test_metrics_lose_no_count_between_threads(memory: MemoryStore) -> None:
    metrics = StoreMetrics()
    store = MetricsStore(memory, metrics)
    threads = [
        threading.Thread(target=lambda: [store.get("k", limit=10) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (metrics.snapshot()["get"].calls, metrics.snapshot()["get"].bytes_read) == (2000, 8000)
