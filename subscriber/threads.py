"""Run blocking work beside the event loop, on threads that never hold up the end of the process."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

Check = Callable[[], None]
"""Long work calls it between parts; it raises Abandoned once nobody waits for the result any more."""


_abandoned: Final[set[threading.Thread]] = set()


class Abandoned(BaseException):
    """Unwinds work whose caller was cancelled; never leaves its thread."""


async def in_thread(work: Callable[[Check], T]) -> T:
    """The result of `work(check)`, run on a daemon thread.

    If the caller is cancelled it returns at once; the work goes on until its next `check()`, so it must be harmless
    until then. A thread pool would be joined at exit and make a clean stop wait for the network.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    abandoned = threading.Event()

    def check() -> None:
        if abandoned.is_set():
            raise Abandoned

    def deliver(settle: Callable[[], None]) -> None:
        def unless_gone() -> None:
            if not done.done():
                settle()

        try:
            loop.call_soon_threadsafe(unless_gone)
        except RuntimeError:  # the loop has been closed meanwhile: nobody waits
            return

    def run() -> None:
        try:
            result = work(check)
        except Abandoned:
            return
        except BaseException as error:  # noqa: BLE001 - it is handed to the caller, whatever it is
            failure = error
            deliver(lambda: done.set_exception(failure))
        else:
            deliver(lambda: done.set_result(result))

    thread = threading.Thread(target=run, daemon=True, name="deltasync-work")
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        _abandoned.difference_update([other for other in list(_abandoned) if not other.is_alive()])
        _abandoned.add(thread)
        abandoned.set()
        raise


def join_abandoned(seconds: float) -> None:
    """Wait up to `seconds` for work that nobody waits for any more, as a rule until its next `check()`.

    For the end of a run: a thread that the interpreter's exit finds inside torch brings the process down with an abort.
    """
    deadline = time.monotonic() + seconds
    for thread in list(_abandoned):
        thread.join(max(0.0, deadline - time.monotonic()))
