"""Short work on the host's memory that several threads share while the scheduler waits for it."""

import os
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

_MOST: Final = 8
"""Threads; more would only wait for the same memory."""


def lanes() -> int:
    """How many threads may work on the host's memory: as many as torch may use and may run here at once.

    `OMP_NUM_THREADS` and SGLang's binding of ranks to cores therefore hold for this as for any other work of the rank.
    """
    return max(1, min(_MOST, torch.get_num_threads(), len(os.sched_getaffinity(0))))


def share(work: Callable[[int], None], items: int, threads: int) -> float:
    """Do `work` for 0 to `items` - 1, in any order, on this thread and up to `threads` - 1 more.

    Nothing is at work any more on return, with the CPU seconds of all threads. After the first exception nothing more
    is begun, and it is raised.
    """
    todo, failures, seconds = iter(range(items)), list[BaseException](), list[float]()
    taking = threading.Lock()

    def take() -> int | None:
        with taking:
            return None if failures else next(todo, None)

    def lane() -> None:
        began = time.thread_time()
        try:
            with torch.inference_mode():  # of each thread's own
                while (item := take()) is not None:
                    work(item)
        except BaseException as failure:  # noqa: BLE001 - raised below
            failures.append(failure)
        seconds.append(time.thread_time() - began)

    others = list[threading.Thread]()
    try:
        for _ in range(min(threads, items) - 1):
            other = threading.Thread(target=lane, name="deltasync-lane", daemon=True)
            other.start()
            others.append(other)
    except (RuntimeError, MemoryError):
        pass  # as many as this process may have; those that run must be waited for
    lane()
    for other in others:
        other.join()
    if failures:
        raise failures[0]
    return sum(seconds)
