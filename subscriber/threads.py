"""Run blocking work beside the event loop, on threads that never hold up the end of the process."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

Check = Callable[[], None]
"""Long work calls it between parts; it raises Abandoned once nobody waits for the result any more."""


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

    threading.Thread(target=run, daemon=True, name="deltasync-work").start()
    try:
        return await done
    except asyncio.CancelledError:
        abandoned.set()
        raise
