"""Versions that subscribers refuse and an anchor would get them past: who has to be answered with one.

A single trainer answers with its next publish, having looked after the last one on the thread that commits, so that
nobody waits for it; where several feed the stream, the process that keeps its anchors does (`publisher.anchors`). An
anchor that a subscriber does not take does not help it, so it is not offered the next one at once.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from chunkstore.errors import Action, DeltasyncError
from chunkstore.probe import store_clock
from chunkstore.store import Store
from manifest.lease import Lease, read_leases
from manifest.log import VersionLog, open_stream
from publisher.commit import Commit, PublishHandle

log = logging.getLogger("deltasync.publisher")

_LOOK: Final = 30.0  # seconds between looks
_FIRST_PAUSE: Final = 600.0  # seconds until a subscriber that did not take an anchor is offered another
_LONGEST_PAUSE: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """An anchor of `version` was offered; another one not before `again`, unless that was taken. Monotonic seconds."""

    version: int
    again: float
    pause: float


class Answers:
    """Who has to be answered: memory of what each subscriber was offered, without any I/O. `clock`: monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._given: dict[str, _Answer] = {}

    def unanswered(self, leases: Sequence[Lease], whole: int, newest: int) -> list[str]:
        """Subscribers that refuse a version between `whole`, the newest stored whole, and `newest`, and would take
        an anchor.
        """
        return [lease.id for lease in leases if self._refuses(lease, whole, newest) and self._waits(lease)]

    def answered(self, ids: Sequence[str], version: int) -> None:
        """They were offered an anchor of `version`."""
        for name in ids:
            before = self._given.get(name)
            pause = _FIRST_PAUSE if before is None else min(_LONGEST_PAUSE, 2 * before.pause)
            self._given[name] = _Answer(version, self._clock() + pause, pause)

    def _refuses(self, lease: Lease, whole: int, newest: int) -> bool:
        # Above the newest are stray keys; what a person has to change, no anchor helps against.
        return any(r.action == Action.RESEED and whole < r.version <= newest for r in lease.refused)

    def _waits(self, lease: Lease) -> bool:
        given = self._given.get(lease.id)
        if given is None:
            return True
        if lease.applied is not None and lease.applied >= given.version:
            del self._given[lease.id]  # it was taken: what is refused now is another matter
            return True
        return self._clock() >= given.again


class Refusals:
    """Watches the subscribers of the stream in `store`. Safe to use from the trainer's and the committing thread.

    `clock`: monotonic. `look`: seconds between looks at the least.
    """

    def __init__(
        self, store: Store, clock: Callable[[], float] = time.monotonic, look: float = _LOOK
    ) -> None:
        self._store = store
        self._clock = clock
        self._interval = look
        self._answers = Answers(clock)
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._looked: float | None = None
        self._whole = -1

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for an anchor."""
        with self._lock:
            return bool(self._waiting)

    def after(self, handle: PublishHandle) -> None:
        """`handle` is that of a publish: look again once it is done."""
        handle.when_done(self._done)

    def _done(self, future: "Future[Commit | None]") -> None:
        if future.cancelled() or future.exception() is not None:
            return
        commit = future.result()
        if commit is not None and (commit.anchored or commit.manifest.kind == "anchor"):
            self.answered(commit.version)
        self.look()

    def answered(self, version: int) -> None:
        """`version` is stored whole now."""
        with self._lock:
            self._whole = max(self._whole, version)
            self._answers.answered(self._waiting, version)
            self._waiting = []

    def look(self) -> None:
        """Read what subscribers say, unless that was done just now. Logs the store's errors."""
        if self._looked is not None and self._clock() - self._looked < self._interval:
            return
        self._looked = self._clock()
        try:
            self._look()
        except DeltasyncError as error:
            log.warning("cannot tell what subscribers refuse: %s", error)

    def _look(self) -> None:
        stream = open_stream(self._store)
        leases = [lease for lease in read_leases(self._store, stream.id) if lease.refused]
        if not leases:
            with self._lock:
                self._waiting = []
            return
        now = store_clock(self._store)
        versions = VersionLog(self._store, stream)
        whole = max([self._whole, *versions.alternates()])
        newest = max(versions.versions(whole), default=whole)
        live = [lease for lease in leases if lease.live(now, 0.0)]
        with self._lock:
            known = set(self._waiting)
            self._waiting = self._answers.unanswered(live, whole, newest)
        for name in self._waiting:
            if name not in known:
                log.warning("subscriber %s refuses a version: the next one stored whole answers it", name)
