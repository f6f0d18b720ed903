"""One run of a subscriber: connect, find out what the engine holds, then look, follow, report, again and again."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chunkstore.errors import Action, DeltasyncError
from chunkstore.store import Store
from manifest.errors import Untrusted
from manifest.key_files import load_trust
from manifest.log import VersionLog, open_stream
from subscriber.base import Base
from subscriber.config import SubscriberConfig
from subscriber.engine import Engine
from subscriber.errors import EngineChanged, EngineDrift, EngineRestarted, StagedLost, SubscriberError
from subscriber.follow import Follower
from subscriber.holder import Holder
from subscriber.identity import Identity
from subscriber.journal import Journal
from subscriber.lease import Lease
from subscriber.poll import Poller, Watch, sleep_until
from subscriber.report import AppliedVersion, Report
from subscriber.spool import Spool
from subscriber.threads import in_thread

_LONGEST_PAUSE: Final = 60.0  # seconds between tries of what keeps failing
_LONGEST_LOOK: Final = 2.0  # the same between looks while nothing is served: it may be over at any moment


class Session:
    """`staging`: the engine's own directory for updates; fetched chunks lie in `spool`, which others may use as well.

    `on_change(version)`: the engine serves that version now, or nothing (None). Both callbacks run on the loop.
    """

    def __init__(
        self,
        config: SubscriberConfig,
        store: Store,
        engine: Engine,
        journal: Journal,
        report: Report,
        staging: Path,
        spool: Spool,
        on_change: Callable[[int | None], None],
        on_applied: Callable[[AppliedVersion], None],
    ) -> None:
        self._config = config
        self._store = store
        self._trust = load_trust(config.trust)
        self._engine = engine
        self._journal = journal
        self._report = report
        self._staging = staging
        self._spool = spool
        self._share = spool.share()
        self._on_change = on_change
        self._on_applied = on_applied
        self._boot_id = ""
        self._wake = asyncio.Event()
        self._lease = Lease(store, report, config.status_interval)
        self._link: _Link | None = None
        self._recovered = False
        self._seen = -1  # the newest version to go to
        self._strays: set[int] = set()  # listed versions that are passed over, as reported
        self._lost = 0  # looks in a row that failed before there was anything to follow
        self._failure: _Failure | None = None
        self._unaudited = 0  # versions since the last full digest

    async def run(self, until_version: int | None, once: bool) -> None:
        """Follow for ever, or until `until_version` is applied. `once`: catch up and return; raise the first error."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._wake.set)

        watch = Watch(self._store.url, wake)
        renewals = asyncio.create_task(self._lease.run())
        try:
            await self._attach(once)
            follower = await self._connect(once)
            while True:
                watch.start()
                if await self._replaced(follower):
                    watch.stop()
                    watch = Watch(self._store.url, wake)
                    follower = await self._connect(once)
                try:
                    idle = await self._careful(follower, once)
                except EngineRestarted as error:
                    self._report.failed(error)
                    follower.holder.doubt(error.message)
                    await self._attach(once)
                    follower = await self._connect(once)
                    continue
                held = follower.holder.held
                if until_version is not None and held is not None and held.version >= until_version:
                    return
                if idle and once:
                    return
                if idle:
                    await sleep_until(self._wake, self._until_next_look())
        finally:
            watch.stop()
            renewals.cancel()
            await self._lease.end()

    async def _attach(self, once: bool) -> None:
        """Wait for the engine, and go by the journal of its present life."""
        while True:
            try:
                self._boot_id = await self._engine.attach()
                self._journal.begin(self._boot_id)
                break
            except DeltasyncError as error:
                if once:
                    raise
                self._note(error)
                if self._lost == 1:
                    await self._lease.renew()
                else:
                    self._lease.tell()
                await sleep_until(self._wake, self._until_next_look())
        if self._lost:
            self._lost = 0
            self._report.recovered()

    async def _connect(self, once: bool) -> Follower:
        """Wait for the stream to exist and set up what works on it."""
        while True:
            try:
                stream = await in_thread(lambda _: open_stream(self._store, self._trust))
                break
            except DeltasyncError as error:
                if once:
                    raise
                self._note(error)
                await sleep_until(self._wake, self._until_next_look())
        if self._lost:
            self._lost = 0
            self._report.recovered()
        relist = self._config.relist_interval
        log = VersionLog(self._store, stream, trust=self._trust)
        self._link = _Link(
            log,
            Poller(log, self._config.poll_interval, relist),
            Identity(log, relist, self._report),
        )
        self._recovered, self._seen, self._failure = False, -1, None
        self._strays.clear()
        self._report.connected(self._boot_id, stream.id.hex())
        holder = Holder(self._engine, self._journal, self._report, log, self._on_change)
        follower = Follower(
            log,
            holder,
            self._report,
            self._staging,
            self._spool,
            self._share,
            Base(self._config.base_checkpoint),
            fetch_concurrency=self._config.fetch_concurrency,
            prefetch_bytes=self._config.prefetch_bytes,
            look_ahead=self._config.poll_interval,
            newest=self._newest,
            check=lambda: self._check(follower),
            renew=self._lease.renew,
        )
        return follower

    async def _replaced(self, follower: Follower) -> bool:
        """Whether another stream is there by now. Then the engine is held: nothing it holds is current any more."""
        error = await self._connected.identity.replaced()
        if error is None:
            return False
        self._report.failed(error)
        try:
            await follower.holder.abandon(error.message)
        except DeltasyncError as failure:
            self._note(failure)
            self._connected.identity.doubt()  # it may still serve: try again before anything else
            return False
        return True

    @property
    def _connected(self) -> "_Link":
        assert self._link is not None, "connected"
        return self._link

    async def _careful(self, follower: Follower, once: bool) -> bool:
        """One round; what goes wrong with looking is reported and leaves nothing to do for now."""
        try:
            idle = await self._round(follower, once)
        except DeltasyncError as error:
            if once or isinstance(error, EngineRestarted):
                raise
            self._note(error)
            return True
        if self._lost:
            self._lost = 0
            self._report.recovered()
        return idle

    async def _round(self, follower: Follower, once: bool) -> bool:
        """Look once and follow what is new. Returns whether there was nothing to do."""
        await self._check(follower)
        if not self._recovered:
            await self._newest(self._seen)
            await self._check_not_rolled_back(follower)
            await follower.recover(self._seen)
            self._recovered = True
            if follower.holder.held is not None and not self._strays:
                self._report.recovered()
            await follower.tidy(self._seen)
            await self._lease.renew()
        held = follower.holder.held
        version = -1 if held is None else held.version
        target = await self._target(version)
        if target is None:
            return True
        await self._check_not_rolled_back(follower)
        try:
            applied = await follower.follow(target)
        except EngineRestarted:
            raise
        except DeltasyncError as error:
            passed_over = await self._failed(error, target, version)
            if once and not passed_over:
                raise
            if self._failure is not None and self._failure.tries > 1:
                self._lease.tell()
            else:
                await self._lease.renew()
            return not passed_over
        self._failure = None
        self._report.applied(applied)
        self._on_applied(applied)
        self._on_change(applied.version)
        self._lease.tell()
        await self._audit(follower, applied)
        return False

    async def _check(self, follower: Follower) -> None:
        """See that the engine is there and holds what it was left with, else nothing that it holds counts any more."""
        try:
            self._report.paused(await self._engine.check())
        except EngineRestarted:
            raise
        except SubscriberError as error:  # a mismatch as well: another server may have taken its place
            self._recovered = False
            follower.holder.doubt(error.message)
            if isinstance(error, EngineChanged):
                await self._engine.hold(error.message)
            raise

    async def _check_not_rolled_back(self, follower: Follower) -> None:
        """Raises Untrusted if a signed stream shows less than this engine has had; from then on it serves nothing.

        What an engine holds never goes down anyway; this is for the one that has lost it.
        """
        log = self._connected.log
        if log.trust is None or follower.holder.held is not None or self._seen < 0:
            return
        reached = self._journal.reached(log.stream.id.hex())
        if self._seen >= reached:
            return
        error = Untrusted(
            f"{log.store.url} shows versions up to {self._seen}, but version {reached} was applied here before",
            hint=f"newer versions are hidden, refused or deleted: see docs/security.md; to go back to {self._seen} "
            f"on purpose, remove {self._journal.high_water}",
        )
        if self._report.reason != error.message:
            await follower.holder.abandon(error.message)
        raise error

    async def _target(self, held: int) -> int | None:
        """The version to go to now, if any: a newer one at once, one that failed when its time has come."""
        log, failure, seen = self._connected.log, self._failure, self._seen
        again = failure is not None and failure.target == seen and time.monotonic() >= failure.again
        if again and not await in_thread(lambda _: log.exists(seen)):
            # Somebody has put it there and taken it away again: it never was a version.
            self._report.forgiven(seen)
            self._failure, self._seen = None, held
        await self._newest(max(held, self._seen))
        waiting = self._failure is not None and self._failure.target == self._seen and not again
        return None if waiting or self._seen <= held else self._seen

    async def _failed(self, error: DeltasyncError, target: int, held: int) -> bool:
        """The way from `held` to `target` failed. Returns whether another target is looked for at once."""
        tries = 1 if self._failure is None or self._failure.target != target else self._failure.tries + 1
        self._failure = _Failure(target, tries, time.monotonic() + self._backoff(tries))
        # What happened to the engine, or on the way to it, says nothing about the version: no anchor would help.
        final = error.action is not Action.RETRY and not isinstance(error, EngineChanged | StagedLost)
        self._report.failed(error, target, refuse=final)
        if not final:
            return False
        link = self._connected
        link.identity.doubt()
        if await in_thread(lambda _: _contiguous(link.log, held, target)):
            return False
        # It may be no version at all, and must not hide those that are.
        link.poller.avoid(target, error)
        self._strays.add(target)
        self._failure, self._seen = None, held
        return True

    async def _newest(self, after: int) -> int | None:
        self._report.metrics.polls.inc()
        poller = self._connected.poller
        newest = await in_thread(lambda _: poller.newest(after))
        await self._pass_over(poller.strays)
        if newest is None:
            self._report.nothing_above(after)
        else:
            self._seen = newest
            self._report.seen(newest)
        return newest

    async def _pass_over(self, strays: Mapping[int, DeltasyncError]) -> None:
        for version, error in strays.items():
            if version not in self._strays:
                self._report.failed(error, version, refuse=True)
                self._connected.identity.doubt()
        for version in self._strays - strays.keys():
            self._report.forgiven(version)
        changed = self._strays != strays.keys()
        self._strays = set(strays)
        if changed:
            await self._lease.renew()

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
            await self._lease.renew()

    def _note(self, error: DeltasyncError) -> None:
        self._lost += 1
        self._report.failed(error)

    def _until_next_look(self) -> float:
        """Seconds."""
        return self._backoff(self._lost, _LONGEST_PAUSE if self._report.ready else _LONGEST_LOOK)

    def _backoff(self, tries: int, longest: float = _LONGEST_PAUSE) -> float:
        """Seconds until the next try after `tries` failures in a row; 0: the next look."""
        delay = self._config.poll_interval if self._link is None else self._link.poller.delay()
        # Or a fleet that lost its store at one moment would come back to it at one moment.
        return max(delay, min(longest, delay * 2.0 ** min(tries, 20)) * random.uniform(0.8, 1.0))


@dataclass(frozen=True, slots=True)
class _Link:
    """The stream that is followed, and what looks at it."""

    log: VersionLog
    poller: Poller
    identity: Identity


def _contiguous(log: VersionLog, held: int, target: int) -> bool:
    """Whether all versions from `held` to `target` are there."""
    return sum(version <= target for version in log.versions(held)) == target - held


@dataclass(frozen=True, slots=True)
class _Failure:
    """`target` failed `tries` times in a row; `again`: when to try it once more, monotonic seconds."""

    target: int
    tries: int
    again: float
