"""Look for new versions: one cheap HEAD as a rule, a listing at start, after several hits and now and then."""

import asyncio
import heapq
import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from chunkstore.errors import Action, DeltasyncError
from manifest.keys import VERSIONS
from manifest.log import VersionLog
from subscriber.report import event

_HITS: Final = 3  # HEADs that found something, one after the other, before a listing looks further ahead
_DOUBTED: Final = 100  # versions that one listing tries to read at most
_PATIENT: Final = 20  # looks without news before the interval begins to grow
_GROWTH: Final = 1.2
_LONGEST: Final = 4.0  # times the interval


class Poller:
    """`interval`: seconds between looks; `relist`: between listings, because a trimmed log, or a stale NFS cache, must
    not look like "no news". Both are jittered by ±20 %, lest many subscribers ask in step. `clock`: monotonic;
    `uniform`: random numbers in [0, 1).

    Versions are contiguous, so what a listing shows is doubted: the newest version that can be read counts, and what
    lies above it is kept in `strays` with its error until the next listing.
    """

    def __init__(
        self,
        log: VersionLog,
        interval: float,
        relist: float,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._log = log
        self._interval = interval
        self._relist = relist
        self.strays: dict[int, DeltasyncError] = {}
        self._avoided: dict[int, tuple[float, DeltasyncError]] = {}  # until when, and why
        self._clock = clock
        self._uniform = uniform
        self._idle = 0
        self._list_due = -math.inf

    def newest(self, after: int) -> int | None:
        """The newest version above `after` that is visible, or None. Blocks; raises the store's errors."""
        found = self._list(after) if self._list_is_due() else self._step(after)
        self._idle = self._idle + 1 if found is None else 0
        return found

    def avoid(self, version: int, error: DeltasyncError) -> None:
        """`version` is listed and no path leads to it, for `error`: list again now, and pass over it for a while."""
        self._avoided[version] = (self._clock() + self._relist, error)
        self._list_due = -math.inf

    def delay(self) -> float:
        """Seconds to wait before the next look: jittered, and up to four times as long when idle."""
        patience = min(_LONGEST, _GROWTH ** max(0, self._idle - _PATIENT))
        return self._interval * patience * self._jitter()

    def _jitter(self) -> float:
        return 0.8 + 0.4 * self._uniform()

    def _list_is_due(self) -> bool:
        return self._clock() >= self._list_due

    def _list(self, after: int) -> int | None:
        now = self._clock()
        self._avoided = {v: entry for v, entry in self._avoided.items() if entry[0] > now}
        strays: dict[int, DeltasyncError] = {}
        newest: int | None = None
        for version in heapq.nlargest(_DOUBTED, self._log.versions(after)):
            error = self._avoided[version][1] if version in self._avoided else self._unreadable(version)
            if error is None:
                newest = version
                break
            strays[version] = error
        self._list_due, self.strays = now + self._relist * self._jitter(), strays
        return newest

    def _exists(self, version: int) -> bool:
        # What was no manifest is read again; a HEAD cannot tell whether it has become one.
        if version in self.strays and version not in self._avoided:
            return self._unreadable(version) is None
        return self._log.exists(version)

    def _unreadable(self, version: int) -> DeltasyncError | None:
        try:
            self._log.read_required(version)
        except DeltasyncError as error:
            if error.action is Action.RETRY:
                raise
            return error
        return None

    def _step(self, after: int) -> int | None:
        version = after
        while self._exists(version + 1):
            version += 1
            if version - after == _HITS:
                return max(version, self._list(version) or version)
        return None if version == after else version


class Watch:
    """Wakes the poll loop early when a manifest appears in a store on a local file system.

    Only an accelerator: network mounts deliver no events, and every other kind of store has nothing to watch.
    """

    def __init__(self, store_url: str, wake: Callable[[], None]) -> None:
        parts = urlsplit(store_url)
        self._directory = Path(unquote(parts.path)) / VERSIONS if parts.scheme == "file" else None
        self._handler = _Handler(wake)
        self._observer: BaseObserver | None = None

    def start(self) -> None:
        """Begin to watch as soon as there is something to watch; call it again until then."""
        if self._observer is not None or self._directory is None or not self._directory.is_dir():
            return
        observer = Observer()
        observer.daemon = True
        try:
            observer.schedule(self._handler, str(self._directory), recursive=False)
            observer.start()
        except OSError as error:  # inotify's limits: polling goes on without it
            event("watch_failed", logging.WARNING, directory=self._directory, error=error)
            self._directory = None
            return
        self._observer = observer

    def stop(self) -> None:
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()


class _Handler(FileSystemEventHandler):
    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def on_created(self, event: FileSystemEvent) -> None:
        if not Path(str(event.src_path)).name.startswith("."):
            self._wake()


async def sleep_until(wake: asyncio.Event, seconds: float) -> None:
    """Return after `seconds`, or as soon as `wake` is set, which this clears."""
    # Not wait_for, which loses a cancellation that comes together with the wake.
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
    wake.clear()
