"""The subscriber: follow one stream for ever and keep one engine at its newest version."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from chunkstore.http import Answers, StatusServer
from chunkstore.metrics import StoreMetrics
from chunkstore.open import open_store
from subscriber.config import SubscriberConfig
from subscriber.engine import Engine
from subscriber.journal import Journal
from subscriber.page import page
from subscriber.report import AppliedVersion, Report, event
from subscriber.session import Session
from subscriber.threads import join_abandoned

__all__ = ["AppliedVersion", "Subscriber"]

_LAST_WORK: Final = 2.0  # seconds that a stop waits for work it has cut short


class Subscriber:
    """Follows `config.store` and drives `engine`.

    Await `run()`, or let `start()` run it on a thread of its own until `stop()`. `on_applied` is called after each
    apply was recorded, on the loop's thread: keep it short. Whatever the store or the stream does is reported and
    tried again; only a wrong set-up (SubscriberBusy, a port in use) or an error in `on_applied` ends the run.
    """

    def __init__(
        self,
        config: SubscriberConfig,
        engine: Engine,
        on_applied: Callable[[AppliedVersion], None] | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.http_port: int | None = None  # where the status server listens while it runs
        metrics = StoreMetrics()
        self._store = open_store(config.store, metrics)
        self.report = Report(config.id, config.status_interval, metrics)
        self._on_applied = on_applied or (lambda applied: None)
        self._changed = threading.Condition()
        self._version: int | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._stop_asked = False
        self._ended: BaseException | bool = False
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int | None:
        """The version the engine serves, or None."""
        return self._version

    async def run(self, until_version: int | None = None, once: bool = False) -> None:
        """Follow the stream until `stop()`, or until `until_version` is applied.

        `once`: catch up with what is there, then return; the first error is raised. A stop takes effect at once,
        except that an apply that has begun to write is completed and recorded first. Raises SubscriberBusy.
        """
        task = asyncio.ensure_future(self._run(until_version, once))
        with self._changed:
            self._running = (asyncio.get_running_loop(), task)
            if self._stop_asked:
                task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not self._stop_asked:
                raise
        finally:
            join_abandoned(_LAST_WORK)
            with self._changed:
                self._running = None

    def start(self) -> None:
        """Run on a background thread."""
        self._thread = threading.Thread(target=self._run_thread, name="deltasync-subscriber", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the run, from any thread or a signal handler of the loop; waits for the thread that `start` made."""
        with self._changed:
            self._stop_asked = True
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def wait_for(self, version: int, timeout: float | None = None) -> None:
        """Block until the engine serves `version` or a newer one. Not inside `engine.serving()`, nor on the loop.

        Raises TimeoutError, naming the last error, after `timeout` seconds or a stop; what ended the run, if it has.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._reached(version) or self._ended, timeout)
            if self._reached(version):
                return
            ended = self._ended
        if isinstance(ended, BaseException):
            raise ended
        error = self.report.status().last_error
        why = "the subscriber was stopped" if ended else f"{timeout} seconds are over"
        what = f"; last error: {error.kind}: {error.message}" if error else ""
        raise TimeoutError(f"version {version} was not applied: {why}{what}")

    def _reached(self, version: int) -> bool:
        return self._version is not None and self._version >= version

    def _run_thread(self) -> None:
        ended: BaseException | bool = True
        try:
            asyncio.run(self.run())
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            event("ended", logging.ERROR, error=repr(error))
            ended = error
        with self._changed:
            self._ended = ended
            self._changed.notify_all()

    async def _run(self, until_version: int | None, once: bool) -> None:
        with ExitStack() as stack:
            journal = stack.enter_context(Journal(self.config.state_path))
            if self.config.http is not None:
                server = stack.enter_context(StatusServer(self.config.http, _answers(self.report)))
                self.http_port = server.port
            session = Session(
                self.config, self._store, self.engine, journal, self.report, self._serves, self._on_applied
            )
            await session.run(until_version, once)

    def _serves(self, version: int | None) -> None:
        with self._changed:
            self._version = version
            self._changed.notify_all()


def _answers(report: Report) -> Answers:
    return Answers(
        unready=lambda: report.reason,
        status=lambda: report.status().model_dump_json(indent=1),
        metrics=report.metrics.text,
        page=lambda: page(report, time.time()),
    )
