"""One catch-up: from what the engine holds to a target version, by the cheapest path that works."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar
from uuid import uuid4

from chunkstore.crashpoints import crash_point
from chunkstore.errors import Action, DeltasyncError, ObjectMissing
from manifest.catalog import Catalog
from manifest.checkpoint import Checkpoint
from manifest.errors import ChainError, ForeignStream
from manifest.history import History
from manifest.layout import check_layout
from manifest.log import VersionLog, read_catalog
from manifest.plan import Plan
from manifest.schema import ChunkRef, Manifest
from subscriber.base import Base
from subscriber.disk import check_room
from subscriber.engine import Prepared
from subscriber.errors import EngineMismatch, VerificationFailed
from subscriber.holder import Holder
from subscriber.report import AppliedVersion, Report
from subscriber.spool import Share, Spool
from subscriber.stage import stage, staged_bytes
from subscriber.staging import Held
from subscriber.threads import in_thread

T = TypeVar("T")

_EXTENSIONS: Final = 2
"""How often a catch-up may be extended to a newer version before it is written."""


@dataclass(slots=True)
class _Course:
    """What one catch-up has learned: where it may start from, what it must go around, why."""

    target: int
    start: Held | None
    unusable: set[bytes] = field(default_factory=set)  # manifest hashes
    blamed: DeltasyncError | None = None
    extensions: int = 0
    changed: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class _StepFailed(Exception):
    """`cause` happened to one step of a plan, so a path around that step may work."""

    def __init__(self, cause: DeltasyncError, step: Manifest) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.step = step


class Follower:
    """`look_ahead`: seconds between looks for versions to prefetch, and at the engine while it is not needed.

    `newest(after)` looks for a version above `after`; `check()` sees that the engine is what it was left as, and raises
    what it is not; `renew()` publishes the status object, which is the lease.
    """

    def __init__(
        self,
        log: VersionLog,
        holder: Holder,
        report: Report,
        staging: Path,
        spool: Spool,
        share: Share,
        base: Base,
        *,
        fetch_concurrency: int,
        prefetch_bytes: int,
        look_ahead: float,
        newest: Callable[[int], Awaitable[int | None]],
        check: Callable[[], Awaitable[None]],
        renew: Callable[[], Awaitable[None]],
    ) -> None:
        self._log = log
        self._history = History(log)
        self.holder = holder
        self._report = report
        self._staging = staging
        self._spool = spool
        self._share = share
        self._base = base
        self._slots = asyncio.Semaphore(fetch_concurrency)
        self._prefetch_bytes = prefetch_bytes
        self._look_ahead = look_ahead
        self._newest = newest
        self._check_engine = check
        self._renew = renew
        self._catalog: Catalog | None = None
        self._ahead: set[bytes] = set()  # chunks of later versions that were fetched early

    async def catalog_of(self, manifest: Manifest) -> Catalog:
        """The catalog of `manifest`, which is checked to fit it. Raises ManifestInvalid, and as `read_catalog`."""
        catalog = self._catalog
        if catalog is None or catalog.hash != manifest.catalog:
            catalog = await in_thread(lambda _: read_catalog(self._log.store, manifest.catalog))
            self._catalog = catalog
        check_layout(manifest, catalog)
        return catalog

    async def read(self, version: int) -> Manifest | None:
        """The manifest of `version`, or None if there is none."""
        return await in_thread(lambda _: self._history.read(version))

    async def recover(self, newest: int) -> None:
        """At start: find out what the engine holds, and finish an apply that was interrupted.

        With nothing on the record it may still hold one of the versions on the path to `newest`, -1 if there are none.
        If it is found to hold none of them, it serves nothing from here on; one that cannot even be read is left alone.
        """
        await self.holder.recover(self.read, self.catalog_of)
        if self.holder.held is not None or newest < 0:
            return
        try:
            if await self._recognise(newest):
                return
        except EngineMismatch:
            return  # met again, and reported, on the way to `newest`
        except DeltasyncError as error:
            if error.action is Action.RETRY:
                raise
        await self.holder.engine.hold("it holds no version of this stream")

    async def _recognise(self, newest: int) -> bool:
        """Adopt what is live if it is a version on the path to `newest`."""
        path = await in_thread(lambda _: self._history.plan(None, newest, references=True))
        catalog = await self.catalog_of(path.steps[-1])
        state = await self.holder.engine.state(catalog)
        live = state.digests.astype("<u8").tobytes()
        held = next((step for step in reversed(path.steps) if step.digests == live), None)
        if held is not None:
            await self.catalog_of(held)
            await self.holder.adopt(held)
        return held is not None

    async def tidy(self, newest: int) -> None:
        """Unless it is about to be used on the way to `newest`, remove what an earlier try has fetched and staged."""
        held = self.holder.held
        if held is not None and held.version >= newest:
            await self._sweep()
            await self._keep(set(), held.version)

    async def audit(self, manifest: Manifest) -> None:
        """Digest all live weights. Raises EngineDrift, with the engine held, if they are not those of `manifest`."""
        await self.holder.audit(await self.catalog_of(manifest))

    async def follow(self, target: int) -> AppliedVersion:
        """Bring the engine to `target`, or to a newer version that appears meanwhile.

        Tries other paths around what is missing or damaged. Raises the error of the first path when none is left;
        then the engine serves what it held, or nothing if that was lost.
        """
        if self.holder.interrupted:
            await self.holder.recover(self.read, self.catalog_of)
        await self._sweep()
        course = _Course(target, self.holder.held)
        while True:
            plan = await self._plan(course)
            if not plan.steps:  # an interrupted apply has just been finished
                await self.tidy(course.target)
                own = await in_thread(lambda _: self._log.read_required(course.target))
                return self._applied(Plan((own,), 0, False), course)
            try:
                applied = await self._attempt(plan, course)
            except _StepFailed as failed:
                if failed.cause.action is not Action.RESEED:
                    raise failed.cause from failed
                self._blame(failed.cause, course)
                course.unusable.add(failed.step.hash)
            except DeltasyncError as error:
                if not self.holder.interrupted and error.action is not Action.RESEED:
                    raise
                self._blame(error, course)
                await self._reconsider(error, plan, course)
            else:
                if applied is not None:
                    return applied

    async def _attempt(self, plan: Plan, course: _Course) -> AppliedVersion | None:
        """Take the path `plan`. Returns None, with nothing written, if a newer target was seen before the pause."""
        prepared = await self._prepare(plan, course)
        newer = await self._newest(course.target) if course.extensions < _EXTENSIONS else None
        if newer is not None:
            course.extensions += 1
            course.target = newer
            await self._sweep()
            return None
        scattered = await self.holder.write(prepared)
        self._history.forget(course.target)
        await self._keep(self._ahead, course.target)
        course.seconds |= {"scatter": scattered.write_seconds, "pause": scattered.pause_seconds}
        course.changed = prepared.changed
        for phase in ("scatter", "pause", "detect"):
            self._report.phase(course.target, phase, course.seconds[phase])
        self._report.metrics.written_elements.inc(prepared.staged.elements)
        await self._sweep()
        return self._applied(plan, course)

    def _applied(self, plan: Plan, course: _Course) -> AppliedVersion:
        return AppliedVersion(
            version=course.target,
            manifests=plan.steps,
            seconds=course.seconds,
            nbytes=plan.nbytes,
            changed=course.changed,
            from_anchor=plan.from_anchor,
            at=time.time(),
        )

    async def _plan(self, course: _Course) -> Plan:
        """The cheapest path that is left. Raises the error that closed the first one if there is none."""
        while True:
            try:
                return await in_thread(lambda _: self._find_plan(course))
            except ForeignStream:
                raise
            except (ChainError, ObjectMissing) as error:
                if course.start is None:
                    if course.blamed is None:
                        raise
                    raise course.blamed from error
                self._blame(error, course)
                course.start = None  # an anchor below what is held may still lead there

    def _blame(self, error: DeltasyncError, course: _Course) -> None:
        """A path has failed and another one is looked for."""
        course.blamed = course.blamed or error
        self._history.forget()
        self._report.retrying(error, course.target)

    def _find_plan(self, course: _Course) -> Plan:
        start = None if course.start is None else course.start.applied
        references = self._base.configured
        return self._history.plan(start, course.target, course.unusable, references=references)

    async def _prepare(self, plan: Plan, course: _Course) -> Prepared:
        """Fetch, stage and verify; the engine goes on serving and nothing is written to it."""
        catalog = await self._check(plan)
        target = plan.steps[-1]
        self._report.seen(plan.steps[0].version, plan.steps[0].created_at)
        course.seconds["detect"] = self._report.age(target.version, target.created_at)
        if plan.from_anchor:
            self._report.needs(plan.steps[0].version)
            await self._renew()
        await self._timed(course, "fetch", self._watched(self._fetch(plan, catalog)), bytes=plan.nbytes)
        crash_point("subscriber.after_fetch")
        ahead = asyncio.create_task(self._prefetch(target))
        try:
            base = None if plan.from_anchor else course.start
            checkpoint = await self._checkpoint_of(plan.steps[0], catalog)
            path = self._staging / f"update-{target.version}-{uuid4().hex[:8]}"
            staged = await self._timed(
                course,
                "stage",
                self._watched(
                    in_thread(lambda check: stage(plan, catalog, base, self._spool, path, check, checkpoint))
                ),
            )
            crash_point("subscriber.after_stage")
            self._report.metrics.held_bytes.set(staged.nbytes)
            return await self._timed(
                course, "prepare", self.holder.engine.prepare(staged), elements=staged.elements
            )
        except DeltasyncError:  # the disk may be full, and the next try may be a minute away
            await self._sweep()
            raise
        finally:
            ahead.cancel()

    async def _watched(self, work: Awaitable[T]) -> T:
        """The result of `work`, which may take long and needs no engine, unless that is lost meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._look_ahead))[0]:
                await self._check_engine()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _check(self, plan: Plan) -> Catalog:
        catalog: Catalog | None = None
        for step in plan.steps:
            try:
                catalog = await self.catalog_of(step)
                await self._checkpoint_of(step, catalog)
            except DeltasyncError as error:
                raise _StepFailed(error, step) from error
        assert catalog is not None, "a plan to a version that is not held has steps"
        return catalog

    async def _checkpoint_of(self, step: Manifest, catalog: Catalog) -> Checkpoint | None:
        """The checkpoint that `step` refers to, if it is a reference. Raises BaseMissing."""
        if step.kind != "reference":
            return None
        return await self._watched(in_thread(lambda _: self._base.proved(step, catalog)))

    async def _fetch(self, plan: Plan, catalog: Catalog) -> None:
        refs = [chunk for step in plan.steps for chunk in step.chunks]
        await self._keep({ref.hash for ref in refs} | self._ahead, plan.steps[-1].version)
        check_room(self._staging, self._spool.missing_bytes(refs) + staged_bytes(plan, catalog))
        tasks = [
            asyncio.create_task(self._fetch_one(ref, step, catalog))
            for step in plan.steps
            for ref in step.chunks
        ]
        try:
            for task in asyncio.as_completed(tasks):
                await task
        finally:
            for pending in tasks:
                pending.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch_one(self, ref: ChunkRef, step: Manifest, catalog: Catalog) -> None:
        def fetch() -> None:
            # Counted here: a fetch whose caller has gone is carried to its end as well.
            nbytes = self._spool.fetch(ref, catalog, step.version, self._share)
            self._report.metrics.fetched_bytes.inc(nbytes)

        async with self._slots:
            try:
                await in_thread(lambda _: fetch())
            except DeltasyncError as error:
                raise _StepFailed(error, step) from error

    async def _prefetch(self, target: Manifest) -> None:
        """Until cancelled, fetch chunks of the versions after `target` as they appear, up to the configured size."""
        version, left = target.version + 1, self._prefetch_bytes
        self._ahead = set()
        # Whatever is wrong is found again, and reported, when its turn comes.
        with suppress(DeltasyncError, _StepFailed):
            await asyncio.sleep(self._look_ahead)  # `target` was the newest a moment ago
            while True:
                manifest = await self.read(version)
                if manifest is None:
                    await asyncio.sleep(self._look_ahead)
                    continue
                left -= manifest.nbytes
                if left < 0 or manifest.catalog != target.catalog:
                    return
                catalog = await self.catalog_of(manifest)
                for ref in manifest.chunks:
                    self._ahead.add(ref.hash)
                    await self._fetch_one(ref, manifest, catalog)
                version += 1

    async def _reconsider(self, error: DeltasyncError, plan: Plan, course: _Course) -> None:
        """After a failure that no single step explains: what does the engine hold now, and what is left to try?

        Raises `error` if trying again at once would be the same.
        """
        before = None if course.start is None else course.start.version
        await self.holder.recover(self.read, self.catalog_of)
        course.start = self.holder.held
        if before != (None if course.start is None else course.start.version):
            return
        if not isinstance(error, VerificationFailed):
            raise error
        # Some step is wrong and nobody can say which: take the first one out, until a path holds.
        course.unusable.add(plan.steps[0].hash)

    async def _keep(self, hashes: set[bytes], reached: int) -> None:
        await in_thread(lambda _: self._spool.keep(self._share, hashes, reached))

    async def _sweep(self) -> None:
        """Remove staged updates; none is needed once its apply is on the record.

        On a thread, as `_keep`: many gigabytes take seconds, and another engine may be paused meanwhile.
        """
        done = list(self._staging.glob("update-*"))

        def remove() -> None:
            for path in done:
                shutil.rmtree(path, ignore_errors=True)
                crash_point("subscriber.mid_sweep")

        await in_thread(lambda _: remove())

    async def _timed(self, course: _Course, name: str, work: Awaitable[T], **fields: object) -> T:
        began = time.perf_counter()
        result = await work
        seconds = time.perf_counter() - began
        course.seconds[name] = course.seconds.get(name, 0.0) + seconds
        self._report.phase(course.target, name, seconds, **fields)
        return result
