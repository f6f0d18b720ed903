"""One run of a subscriber: connect, find out what the engine holds, then look, follow, report, again and again."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from chunkstore.errors import Action, DeltasyncError
from chunkstore.store import Store
from manifest.errors import ForeignStream
from manifest.keys import status_key
from manifest.log import VersionLog, open_stream
from subscriber.config import SubscriberConfig
from subscriber.disk import disk_errors
from subscriber.engine import Engine
from subscriber.errors import EngineDrift
from subscriber.follow import Follower
from subscriber.holder import Holder
from subscriber.journal import Journal
from subscriber.poll import Poller, Watch, sleep_until
from subscriber.report import AppliedVersion, Report, event
from subscriber.threads import in_thread

_LONGEST_PAUSE: Final = 60.0  # seconds between tries of what keeps failing
_LAST_WORD: Final = 2.0  # seconds for the status object that says "stopped"


class Session:
    """`on_change(version)`: the engine serves that version now, or nothing (None). Both callbacks run on the loop."""

    def __init__(
        self,
        config: SubscriberConfig,
        store: Store,
        engine: Engine,
        journal: Journal,
        report: Report,
        on_change: Callable[[int | None], None],
        on_applied: Callable[[AppliedVersion], None],
    ) -> None:
        self._config = config
        self._store = store
        self._engine = engine
        self._journal = journal
        self._report = report
        self._on_change = on_change
        self._on_applied = on_applied
        self._wake = asyncio.Event()
        self._renewing = asyncio.Lock()
        self._poller: Poller | None = None
        self._recovered = False
        self._seen = -1  # the newest version that was ever visible
        self._lost = 0  # looks in a row that failed before there was anything to follow
        self._failure: _Failure | None = None
        self._foreign = False  # the last failure was a manifest of another stream
        self._unaudited = 0  # versions since the last full digest

    async def run(self, until_version: int | None, once: bool) -> None:
        """See `Subscriber.run`."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._wake.set)

        watch = Watch(self._store.url, wake)
        lease = asyncio.create_task(self._renew_for_ever())
        try:
            follower = await self._connect(once)
            while True:
                watch.start()
                if self._foreign and follower.holder.held is None:
                    # The stream's own record may have been damaged, or replaced, when it was read.
                    self._foreign = self._recovered = False
                    follower = await self._connect(once)
                idle = await self._careful(follower, once)
                held = follower.holder.held
                if until_version is not None and held is not None and held.version >= until_version:
                    return
                if idle and once:
                    return
                if idle:
                    await sleep_until(self._wake, self._backoff(self._lost))
        finally:
            watch.stop()
            lease.cancel()
            await self._last_word()

    async def _connect(self, once: bool) -> Follower:
        """Wait for the stream to exist and set up what works on it."""
        while True:
            try:
                stream = await in_thread(lambda _: open_stream(self._store))
                break
            except DeltasyncError as error:
                if once:
                    raise
                self._note(error)
                await sleep_until(self._wake, self._backoff(self._lost))
        self._lost = 0
        self._report.recovered()
        self._report.connected(self._engine.boot_id, stream.id.hex())
        log = VersionLog(self._store, stream)
        self._poller = Poller(log, self._config.poll_interval)
        holder = Holder(self._engine, self._journal, self._report, stream.id, self._on_change)
        return Follower(
            log,
            holder,
            self._report,
            self._config.staging_path,
            fetch_concurrency=self._config.fetch_concurrency,
            prefetch_bytes=self._config.prefetch_bytes,
            look_ahead=self._config.poll_interval,
            newest=self._newest,
            renew=self._renew,
        )

    async def _careful(self, follower: Follower, once: bool) -> bool:
        """One round; what goes wrong with looking is reported and leaves nothing to do for now."""
        try:
            idle = await self._round(follower, once)
        except DeltasyncError as error:
            if once:
                raise
            self._note(error)
            return True
        if self._lost:
            self._lost = 0
            self._report.recovered()
        return idle

    async def _round(self, follower: Follower, once: bool) -> bool:
        """Look once and follow what is new. Returns whether there was nothing to do."""
        if not self._recovered:
            await self._newest(self._seen)
            with disk_errors(self._config.staging_path):
                await follower.recover(self._seen)
            self._recovered = True
            await self._renew()
        held = follower.holder.held
        target = await self._target(-1 if held is None else held.version)
        if target is None:
            return True
        try:
            with disk_errors(self._config.staging_path):
                applied = await follower.follow(target)
        except DeltasyncError as error:
            if once:
                raise
            self._foreign = isinstance(error, ForeignStream)
            tries = 1 if self._failure is None or self._failure.target != target else self._failure.tries + 1
            self._failure = _Failure(target, tries, time.monotonic() + self._backoff(tries))
            self._report.failed(error, target, refuse=error.action is not Action.RETRY)
            if error.action is not Action.RETRY:
                # Believe the log, not the memory of it: what was listed may be gone, or never have been a version.
                self._seen = -1 if follower.holder.held is None else follower.holder.held.version
            await self._renew()
            return True
        self._failure, self._foreign = None, False
        self._report.applied(applied)
        self._on_applied(applied)
        self._on_change(applied.version)
        await self._renew()
        await self._audit(follower, applied)
        return False

    async def _target(self, held: int) -> int | None:
        """The version to go to now, if any: a newer one at once, one that failed when its time has come."""
        await self._newest(max(held, self._seen))
        failure = self._failure
        waiting = (
            failure is not None and failure.target == self._seen and time.monotonic() < failure.again
        )
        return None if waiting or self._seen <= held else self._seen

    async def _newest(self, after: int) -> int | None:
        self._report.metrics.polls.inc()
        poller = self._poller
        assert poller is not None, "connected"
        newest = await in_thread(lambda _: poller.newest(after))
        if newest is not None:
            self._seen = newest
            self._report.seen(newest)
        return newest

    async def _audit(self, follower: Follower, applied: AppliedVersion) -> None:
        # A path from an anchor ends with a full digest by itself.
        self._unaudited = 0 if applied.from_anchor else self._unaudited + len(applied.manifests)
        if self._unaudited < self._config.audit_every:
            return
        self._unaudited = 0
        try:
            await follower.audit(applied.manifest)
        except EngineDrift as error:
            self._report.failed(error, applied.version)
            await self._renew()

    def _note(self, error: DeltasyncError) -> None:
        self._lost += 1
        self._report.failed(error)

    def _backoff(self, tries: int) -> float:
        """Seconds until the next try after `tries` failures in a row; 0: the next look."""
        delay = self._config.poll_interval if self._poller is None else self._poller.delay()
        return max(delay, min(_LONGEST_PAUSE, delay * 2.0 ** min(tries, 20)))

    async def _renew(self) -> None:
        """Publish the status object, which renews the lease. That it fails must not stop the weights."""
        async with self._renewing:  # one after the other, so that the last one written is the newest
            data = self._report.status().model_dump_json(indent=1).encode()
            try:
                await in_thread(lambda _: self._store.put(status_key(self._config.id), data))
            except DeltasyncError as error:
                self._report.metrics.errors.labels(error.kind).inc()
                event("status_not_written", logging.WARNING, kind=error.kind, error=error)

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._config.status_interval)
            await self._renew()

    async def _last_word(self) -> None:
        self._report.stopped()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._renew(), _LAST_WORD)


@dataclass(frozen=True, slots=True)
class _Failure:
    """`target` failed `tries` times in a row; `again`: when to try it once more, monotonic seconds."""

    target: int
    tries: int
    again: float
