"""Work that threads share: all of it once, nobody at work afterwards, and one failure stops it."""

import sys
import threading
import time
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subscriber.sglang.lanes import lanes, share
from tests.subscriber.parts import TIMEOUT, until


@given(items=st.integers(0, 40), threads=st.integers(1, 5))
def test_everything_is_done_once(items: int, threads: int) -> None:
    done = Counter[int]()
    share(lambda item: done.update([item]), items, threads)
    assert done == Counter(range(items))


def test_threads_work_at_the_same_time_and_write_what_nobody_else_may() -> None:
    """SGLang's weights are inference tensors, and inference mode is a thread's own."""
    with torch.inference_mode():
        weights = torch.zeros(3)
    together = threading.Barrier(3, timeout=TIMEOUT)
    names = set[int]()

    def work(item: int) -> None:
        together.wait()
        weights[item] += item
        names.add(threading.get_ident())

    share(work, 3, 3)
    assert weights.tolist() == [0, 1, 2]
    assert len(names) == 3
    assert threading.get_ident() in names


def waits_for_others(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "join":
            return True
        frame = frame.f_back
    return False


@pytest.mark.parametrize("by_caller", [True, False])
def test_after_a_failure_nothing_is_begun_and_nobody_is_at_work(by_caller: bool) -> None:
    caller = threading.get_ident()
    both, failed = threading.Barrier(2, timeout=TIMEOUT), threading.Event()
    begun, ended = list[int](), list[int]()

    def work(item: int) -> None:
        begun.append(item)
        both.wait()
        if (threading.get_ident() == caller) == by_caller:
            failed.set()
            raise OSError("of the disk")
        assert failed.wait(TIMEOUT)
        if by_caller:
            until(lambda: waits_for_others(caller))
        else:
            until(lambda: threading.active_count() == others)
        ended.append(item)

    others = threading.active_count()
    with pytest.raises(OSError, match="of the disk"):
        share(work, 50, 2)
    assert len(begun) == 2
    assert len(ended) == 1
    assert threading.active_count() == others


def test_cpu_seconds_are_those_of_all_threads() -> None:
    own = list[float]()

    def work(_: int) -> None:
        together.wait()
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass
        own.append(time.thread_time() - began)

    together = threading.Barrier(2, timeout=TIMEOUT)
    seconds = share(work, 2, 2)
    assert len(own) == 2
    assert sum(own) <= seconds < sum(own) + 0.05


def test_where_no_thread_can_be_had_the_work_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server at its limit of threads would otherwise stay paused for ever."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    done = list[int]()
    share(done.append, 7, 4)
    assert done == list(range(7))


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_threads_that_run_are_waited_for_even_if_the_next_cannot_be_had(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever went on writing after the answer would write into what is served."""
    original, started, before = threading.Thread.start, list[str](), threading.active_count()

    def start(self: threading.Thread) -> None:
        if started:
            raise error("no second one")
        started.append(self.name)
        original(self)

    def work(item: int) -> None:
        if item < 2:  # one for each of the two
            both.wait()
        if threading.current_thread().name in started:
            until(lambda: waits_for_others(caller))
        done.append(item)

    monkeypatch.setattr(threading.Thread, "start", start)
    caller, both, done = threading.get_ident(), threading.Barrier(2, timeout=TIMEOUT), list[int]()
    share(work, 3, 3)
    assert sorted(done) == [0, 1, 2]
    assert threading.active_count() == before


@pytest.mark.parametrize(("torch_may", "cores", "expected"), [(4, 2, 2), (1, 8, 1), (64, 64, 8)])
def test_threads_are_as_many_as_the_operator_gave(
    torch_may: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_may)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert lanes() == expected
