"""What the engine holds, on the record: every change of it passes the journal before and after."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from chunkstore.crashpoints import crash_point
from manifest.catalog import Catalog
from manifest.errors import Untrusted
from manifest.log import VersionLog
from manifest.schema import Manifest
from subscriber.engine import Engine, Prepared, Scattered
from subscriber.errors import EngineBusy, EngineDrift, StagedLost, VerificationFailed
from subscriber.journal import AppliedRecord, ApplyingRecord, Entry, Journal
from subscriber.report import Report, event
from subscriber.staging import Held, load_staged
from subscriber.threads import in_thread
from subscriber.verify import holds

CatalogOf = Callable[[Manifest], Awaitable[Catalog]]
Read = Callable[[int], Awaitable[Manifest | None]]


class Holder:
    """The engine's verified version, `held`, or None while what it holds is no version: then it serves nothing.

    `log`: of the stream, says what is trusted. `on_change(version)` is told what is served, None for nothing.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        report: Report,
        log: VersionLog,
        on_change: Callable[[int | None], None],
    ) -> None:
        self.engine = engine
        self.held: Held | None = None
        self._journal = journal
        self._report = report
        self._log = log
        self._stream = log.stream.id.hex()
        self._on_change = on_change

    async def adopt(self, manifest: Manifest) -> None:
        """The live digests were found to be those of `manifest`: record it and serve it."""
        self._record(manifest)
        await self.engine.release(manifest.version)
        self._report.serving(manifest.version, manifest.root)
        self._on_change(manifest.version)

    async def lose(self, reason: str) -> None:
        """What is live is no version: serve nothing until an anchor has been applied."""
        await self.abandon(reason)
        self._journal.write(Entry(self._stream))

    async def abandon(self, reason: str) -> None:
        """Serve nothing more; what was recorded is left to whoever reads it next."""
        self.doubt(reason)
        crash_point("subscriber.before_hold")
        await self.engine.hold(reason)
        crash_point("subscriber.after_hold")

    async def write(self, prepared: Prepared) -> Scattered:
        """Journal, scatter, journal. Once begun it is carried through, even if the caller is cancelled.

        After EngineBusy all is as before; after another error `held` is None, the engine serves nothing, and `recover`
        decides.
        """
        work = asyncio.ensure_future(self._write(prepared))
        cancelled = False
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            work.exception()  # a stop counts whatever became of the apply
            raise asyncio.CancelledError
        return work.result()

    async def _write(self, prepared: Prepared) -> Scattered:
        staged = prepared.staged
        before = self._journal.read()
        applying = ApplyingRecord(staged.target.version, str(staged.path), staged.hash.hex())
        self._journal.write(Entry(self._stream, None if before is None else before.applied, applying))
        crash_point("subscriber.before_scatter")
        try:
            scattered = await self.engine.scatter(prepared)
            crash_point("subscriber.before_record")
            self._record(staged.target)
        except EngineBusy:
            self._journal.write(before or Entry(self._stream))
            raise
        except BaseException:  # also a cancellation: what the engine holds is not known any more
            self.doubt(f"writing version {staged.target.version} failed")
            raise
        self._report.serving(staged.target.version, staged.target.root)
        crash_point("subscriber.after_record")
        return scattered

    @property
    def interrupted(self) -> bool:
        """Whether an apply began that is not known to have ended."""
        entry = self._journal.read()
        return entry is not None and entry.stream == self._stream and entry.applying is not None

    async def recover(self, read: Read, catalog_of: CatalogOf) -> None:
        """Find out what the engine really holds, finish an apply that was interrupted, and set `held`.

        `read` returns a committed manifest. If what is live is no version on the record, `held` becomes None.
        Raises the engine's and the store's errors, after which it may be called again.
        """
        entry = self._journal.read()
        if entry is None or entry.stream != self._stream:
            return
        if entry.applying is not None and await self._finish(entry.applying):
            return
        if entry.applied is not None:
            try:
                manifest = await read(entry.applied.version)
            except Untrusted as error:
                # Its key was revoked since, and what it has signed is not served any more.
                self._report.failed(error, entry.applied.version)
                manifest = None
            same = manifest is not None and manifest.hash.hex() == entry.applied.manifest_hash
            if (
                manifest is not None
                and same
                and await self._adopt_if_live(manifest, await catalog_of(manifest))
            ):
                return
        await self.lose("what the engine holds is no version that was applied")

    async def _finish(self, applying: ApplyingRecord) -> bool:
        """Bring an interrupted apply to its end from its staged values. Returns False if that cannot be."""
        path, index_hash = Path(applying.staged), bytes.fromhex(applying.index_hash)
        try:
            staged = await in_thread(lambda _: load_staged(path, index_hash))
            self._log.check_trusted(staged.target, f"the staged version {applying.version}")
            if await self._adopt_if_live(staged.target, staged.catalog):
                event("apply_was_complete", version=applying.version)
                return True
            # Nobody knows how far the writing came. The values are absolute, so writing all of them again is right.
            await self.write(Prepared(staged, token=None, changed=None))
        except (StagedLost, VerificationFailed, Untrusted) as error:
            self._report.failed(error, applying.version)
            return False
        event("apply_was_repeated", version=applying.version)
        self._on_change(applying.version)
        return True

    async def _adopt_if_live(self, manifest: Manifest, catalog: Catalog) -> bool:
        state = await self.engine.state(catalog)
        if not holds(catalog, state.digests, manifest.root):
            return False
        await self.adopt(manifest)
        return True

    async def audit(self, catalog: Catalog) -> None:
        """Digest all live weights. Raises EngineDrift, with the engine held, if they are not those of `held`."""
        held = self.held
        if held is None:
            return
        began = time.perf_counter()
        state = await self.engine.state(catalog)
        drifted = [
            spec.name
            for spec, live, recorded in zip(catalog.tensors, state.digests, held.digests, strict=True)
            if live != recorded
        ]
        self._report.phase(held.version, "audit", time.perf_counter() - began, drifted=len(drifted))
        self._report.metrics.audits.labels("drift" if drifted else "ok").inc()
        if drifted:
            error = EngineDrift(
                f"live weights are no longer those of version {held.version}: {', '.join(drifted[:50])}",
                hint="write the engine only through the subscriber; it is being restored from an anchor",
            )
            await self.lose(error.message)
            raise error

    def doubt(self, reason: str) -> None:
        """What the engine holds, or whether it still is there, is not known any more; `recover` finds out."""
        self.held = None
        self._report.held(reason)
        self._on_change(None)

    def _record(self, manifest: Manifest) -> None:
        record = AppliedRecord(manifest.version, manifest.root.hex(), manifest.hash.hex())
        self._journal.write(Entry(self._stream, record))
        if self._log.trust is not None:
            self._journal.reach(self._stream, manifest.version)
        self.held = Held(manifest.version, manifest.root, manifest.hash, manifest.digest_array)
