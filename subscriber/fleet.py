"""One daemon for several engines: they share the stream, the fetched chunks and the process, and nothing else."""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chunkstore.http import StatusServer, check_address
from chunkstore.metrics import StoreMetrics
from chunkstore.open import open_store
from subscriber.answers import answers_of
from subscriber.config import SERVER_NAME, SubscriberConfig
from subscriber.engine import Engine
from subscriber.journal import Journal, locked, locked_folder
from subscriber.report import SERVER, AppliedVersion, Report, event
from subscriber.session import Session
from subscriber.spool import Spool
from subscriber.threads import join_abandoned
from subscriber.typed import TypedEngine

_LAST_WORK: Final = 2.0  # seconds that a stop waits for work it has cut short


@dataclass(slots=True, eq=False)
class _Member:
    """One engine. `files`: the path of its own directories below those of the daemon. `version`: what it serves."""

    engine: Engine
    report: Report
    files: Path
    version: int | None = None


def check_place(config: SubscriberConfig) -> None:
    """Raise what would end a run at its start, for whoever has to make a large engine before it.

    SubscriberBusy, StagingUnavailable or StagingFull of a directory, ConfigError of a port in use.
    """
    with locked(config.state_path), locked_folder(config.staging_path):
        if config.http is not None:
            check_address(config.http)


class Fleet:
    """Follows `config.store` and drives `engines`, by name, each at its own pace.

    One that is away, restarts or is behind holds up no other; each has its own journal, status object and staging
    directory. With several engines their names are part of all three: the status object of `a` is `<id>.a`.

    Await `run()`, or let `start()` run it on a thread of its own until `stop()`. `on_applied(name, applied)` is called
    after each apply was recorded, on the loop's thread: keep it short. Whatever the store, the stream or an engine does
    is reported and tried again, also what an engine should never have raised; only a wrong set-up (SubscriberBusy, a
    port in use), an error in `on_applied` or a fault of ours outside of the engines ends the run.
    """

    def __init__(
        self,
        config: SubscriberConfig,
        engines: Mapping[str, Engine],
        on_applied: Callable[[str, AppliedVersion], None] | None = None,
    ) -> None:
        self.config = config
        self.http_port: int | None = None  # where the status server listens while it runs
        self._metrics = StoreMetrics()
        self._store = open_store(config.store, self._metrics, make=False)
        self._members = self._make_members(engines)
        self._on_applied = on_applied or (lambda name, applied: None)
        self._changed = threading.Condition()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._stop_asked = False
        self._ended: BaseException | bool = False
        self._thread: threading.Thread | None = None

    def _make_members(self, engines: Mapping[str, Engine]) -> dict[str, _Member]:
        config = self.config
        if len(engines) == 1:
            report = Report(config.id, config.status_interval, self._metrics)
            return {name: _Member(TypedEngine(engine), report, Path()) for name, engine in engines.items()}
        if not engines or not all(re.fullmatch(SERVER_NAME, name) for name in engines):
            raise ValueError(f"{list(engines)}: engines need names that can be file names")
        return {
            name: _Member(
                TypedEngine(engine),
                Report(f"{config.id}.{name}", config.status_interval, None),
                Path("servers") / name,
            )
            for name, engine in engines.items()
        }

    @property
    def versions(self) -> dict[str, int | None]:
        """The version that each engine serves, or None."""
        return {name: member.version for name, member in self._members.items()}

    @property
    def reports(self) -> dict[str, Report]:
        """What is known of each engine."""
        return {name: member.report for name, member in self._members.items()}

    async def run(self, until_version: int | None = None, once: bool = False) -> None:
        """Follow the stream until `stop()`, or until all engines are at `until_version`.

        `once`: catch up with what is there, then return; the first error is raised when all engines are done. A stop
        takes effect at once, except that an apply that has begun to write is completed and recorded first. Raises
        SubscriberBusy.
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
        """Block until every engine serves `version` or a newer one. Not inside `engine.serving()`, nor on the loop.

        Raises TimeoutError, naming the last error, after `timeout` seconds or a stop; what ended the run, if it has.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._below(version) or self._ended, timeout)
            below, ended = self._below(version), self._ended
        if not below:
            return
        if isinstance(ended, BaseException):
            raise ended
        why = "the subscriber was stopped" if ended else f"{timeout} seconds are over"
        errors = [error for member in below if (error := member.report.status().last_error)]
        what = f"; last error: {errors[0].kind}: {errors[0].message}" if errors else ""
        raise TimeoutError(
            f"version {version} was not applied by {', '.join(m.report.id for m in below)}: {why}{what}"
        )

    def _below(self, version: int) -> list[_Member]:
        return [m for m in self._members.values() if m.version is None or m.version < version]

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
        config = self.config
        with ExitStack() as stack:
            stack.enter_context(locked(config.state_path))
            stack.enter_context(locked_folder(config.staging_path))
            if config.http is not None:
                answers, parts = answers_of(config.id, self.reports, self._metrics)
                self.http_port = stack.enter_context(StatusServer(config.http, answers, parts)).port
            spare = config.prefetch_bytes if len(self._members) > 1 else 0
            spool = Spool(self._store, config.staging_path / "chunks", spare)
            await _run_all({name: self._session(name, spool) for name in self._members}, until_version, once)

    def _session(self, name: str, spool: Spool) -> Session:
        member, config = self._members[name], self.config

        def on_change(version: int | None) -> None:
            with self._changed:
                member.version = version
                self._changed.notify_all()

        return Session(
            config,
            self._store,
            member.engine,
            Journal(config.state_path / member.files),
            member.report,
            config.staging_path / member.files,
            spool,
            on_change,
            lambda applied: self._on_applied(name, applied),
        )


async def _run_all(sessions: Mapping[str, Session], until_version: int | None, once: bool) -> None:
    """Run `sessions` to their ends. The first error ends the others too; with `once` it waits until they are done."""
    errors: list[Exception] = []

    async def run(name: str, session: Session) -> None:
        if len(sessions) > 1:
            SERVER.set(name)
        try:
            await session.run(until_version, once)
        except Exception as error:
            if not once:
                raise
            errors.append(error)

    try:
        async with asyncio.TaskGroup() as group:
            for name, session in sessions.items():
                group.create_task(run(name, session))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    for error in errors[1:]:
        event("failed", logging.ERROR, error=str(error))
    if errors:
        raise errors[0]
