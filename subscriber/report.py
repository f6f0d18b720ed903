"""What the subscriber tells people: one place that logs, counts and remembers for /status."""

import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version as release_of
from typing import Final, Literal

from chunkstore.errors import Action, DeltasyncError
from chunkstore.metrics import StoreMetrics
from manifest.schema import Manifest
from subscriber.metrics import Metrics
from subscriber.status import MAX_REFUSED, ErrorStatus, RefusedVersion, SubscriberStatus

log = logging.getLogger("deltasync.subscriber")

TIMELINE: Final = 100  # versions remembered for the status page

SERVER: Final[ContextVar[str | None]] = ContextVar("SERVER", default=None)
"""Whose events are logged: set for everything that is done for one of several engines."""


@dataclass(frozen=True, slots=True)
class AppliedVersion:
    """One apply: the version reached and how.

    `manifests`: the steps taken, the last one is the version's own. `seconds` by phase: detect, fetch, stage,
    prepare, scatter, pause. `nbytes`: chunk bytes of the steps. `changed`: elements whose bits differ from before,
    None where the old ones were not read. `from_anchor`: the first step was an anchor. `at`: Unix seconds.
    """

    version: int
    manifests: tuple[Manifest, ...]
    seconds: dict[str, float]
    nbytes: int
    changed: int | None
    from_anchor: bool
    at: float

    @property
    def manifest(self) -> Manifest:
        return self.manifests[-1]


@dataclass(slots=True)
class _State:
    boot_id: str = ""
    stream: str = ""
    state: Literal["serving", "held", "stopped"] = "held"
    reason: str | None = "no verified version has been loaded yet"
    paused: str | None = None
    applied: int | None = None
    root: str | None = None
    applied_at: float | None = None
    newest: int | None = None
    behind_since: float | None = None
    looks: dict[int, float] = field(default_factory=dict)  # version → when there last was none above it
    needs: int | None = None
    last_error: ErrorStatus | None = None
    refused: dict[int, RefusedVersion] = field(default_factory=dict)
    timeline: deque[AppliedVersion] = field(default_factory=lambda: deque(maxlen=TIMELINE))


class Report:
    """Safe to use from any thread. `subscriber_id`: of the status object. `clock`: Unix seconds.

    `store`: told with the metrics, unless None: told elsewhere.
    """

    def __init__(
        self,
        subscriber_id: str,
        renew_seconds: float,
        store: StoreMetrics | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id = subscriber_id
        self._renew_seconds = renew_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._state = _State()
        self.metrics = Metrics(store, self.lag)
        self.metrics.applied_version.set(-1)
        self.metrics.newest_version.set(-1)

    @property
    def ready(self) -> bool:
        """Whether the engine serves a verified version."""
        return self._state.state == "serving" and self._state.paused is None

    @property
    def reason(self) -> str | None:
        """Why the engine is not ready; None if it is."""
        return self._state.reason or self._state.paused

    def lag(self) -> tuple[int, float]:
        """Versions, and seconds since the oldest one of them was committed."""
        with self._lock:
            state = self._state
            versions = (-1 if state.newest is None else state.newest) - (
                -1 if state.applied is None else state.applied
            )
            if versions <= 0 or state.behind_since is None:
                return 0, 0.0
            return versions, max(0.0, self._clock() - state.behind_since)

    def connected(self, boot_id: str, stream: str) -> None:
        """What is followed from now on; nothing learned about another stream counts any more."""
        with self._lock:
            state = self._state
            if state.stream != stream:
                state.newest = state.behind_since = state.needs = None
                state.looks.clear()
                state.refused.clear()
                self.metrics.newest_version.set(-1)
                self.metrics.refused.set(0)
            state.boot_id, state.stream = boot_id, stream
        event("connected", boot_id=boot_id, stream=stream)

    def seen(self, version: int, since: float | None = None) -> None:
        """`version` exists; `since`: when it was committed, Unix seconds by the publisher's clock."""
        with self._lock:
            state = self._state
            newest = state.newest = max(version, -1 if state.newest is None else state.newest)
            if version > (-1 if state.applied is None else state.applied):
                known = self._clock() if since is None else self._ours(version, since)
                state.behind_since = min(known, known if state.behind_since is None else state.behind_since)
        self.metrics.newest_version.set(newest)

    def nothing_above(self, version: int) -> None:
        """A look has just found none above `version`."""
        with self._lock:
            self._state.looks[version] = self._clock()

    def age(self, version: int, since: float) -> float:
        """Seconds since `version` was committed, at `since` by the publisher's clock."""
        with self._lock:
            return self._clock() - self._ours(version, since)

    def _ours(self, version: int, since: float) -> float:
        """A publisher's time by the clock here, however wrong either is.

        A version is younger than the last look that did not find it, and none comes from the future.
        """
        missing = max((at for above, at in self._state.looks.items() if above < version), default=since)
        return min(max(since, missing), self._clock())

    def needs(self, version: int | None) -> None:
        """The lowest version whose objects will still be read."""
        with self._lock:
            self._state.needs = version

    def phase(self, version: int, name: str, seconds: float, **fields: object) -> None:
        """One line and one observation per version and phase."""
        self.metrics.phase(name, seconds)
        event("phase", version=version, phase=name, seconds=round(seconds, 6), **fields)

    def serving(self, version: int, root: bytes) -> None:
        """The engine serves `version`, verified."""
        with self._lock:
            state = self._state
            state.state, state.reason, state.paused = "serving", None, None
            state.applied, state.root, state.needs = version, root.hex(), version
            behind = state.newest is not None and state.newest > version
            state.behind_since = self._clock() if behind else None
            state.applied_at = self._clock()
            state.looks = {v: at for v, at in state.looks.items() if v >= version} or state.looks
            state.refused = {v: refusal for v, refusal in state.refused.items() if v > version}
            refused = len(state.refused)
        self.metrics.refused.set(refused)
        self.metrics.applied_version.set(version)
        self.metrics.ready.set(1)

    def applied(self, applied: AppliedVersion) -> None:
        """An apply was recorded."""
        with self._lock:
            self._state.timeline.append(applied)
            self._state.last_error = None
        self.metrics.applies.inc()
        self.metrics.versions.inc(len(applied.manifests))
        self.metrics.changed_elements.inc(applied.changed or 0)
        self.metrics.pause_seconds.observe(applied.seconds.get("pause", 0.0))
        event(
            "applied",
            version=applied.version,
            steps=len(applied.manifests),
            from_anchor=applied.from_anchor,
            bytes=applied.nbytes,
            changed=applied.changed,
        )

    def held(self, reason: str) -> None:
        """The engine serves nothing."""
        with self._lock:
            state = self._state
            known = (state.state, state.reason) == ("held", reason)
            state.state, state.reason = "held", reason
            state.applied = state.root = None
        self.metrics.applied_version.set(-1)
        self.metrics.ready.set(0)
        if not known:
            event("held", logging.WARNING, reason=reason)

    def paused(self, reason: str | None) -> None:
        """Why the engine serves nothing though it was left serving; None: it serves."""
        with self._lock:
            known, self._state.paused = self._state.paused, reason
            ready = self.ready
        self.metrics.ready.set(int(ready))
        if reason is not None and known is None:
            event("paused", logging.WARNING, reason=reason)

    def stopped(self) -> None:
        with self._lock:
            self._state.state, self._state.reason = "stopped", "the subscriber was stopped"
        self.metrics.ready.set(0)
        event("stopped")

    def failed(self, error: DeltasyncError, version: int | None = None, *, refuse: bool = False) -> None:
        """`error` happened on the way to `version`; `refuse`: trying it again at once is useless."""
        with self._lock:
            self._state.last_error = ErrorStatus(
                kind=error.kind, action=error.action, message=error.message[:4000], hint=error.hint[:4000],
                at=self._clock(),
            )  # fmt: skip
            if refuse and version is not None:
                self._state.refused[version] = RefusedVersion(
                    version=version, kind=error.kind, action=error.action, message=error.message[:4000]
                )
                for old in sorted(self._state.refused)[:-MAX_REFUSED]:
                    del self._state.refused[old]
            refused = len(self._state.refused)
        self.metrics.refused.set(refused)
        self.metrics.errors.labels(error.kind).inc()
        level = logging.WARNING if error.action is Action.RETRY else logging.ERROR
        event(
            "failed",
            level,
            version=version,
            kind=error.kind,
            action=error.action.value,
            error=str(error),
        )

    def retrying(self, error: DeltasyncError, version: int) -> None:
        """`error` closed one path to `version`; another one is tried at once."""
        self.metrics.retries.labels(error.kind).inc()
        event("path_failed", logging.WARNING, version=version, kind=error.kind, error=str(error))

    def forgiven(self, version: int) -> None:
        """What was refused as `version` is gone."""
        with self._lock:
            state = self._state
            gone = state.refused.pop(version, None)
            if gone and state.last_error and state.last_error.message == gone.message:
                state.last_error = None
            refused = len(state.refused)
        self.metrics.refused.set(refused)

    def recovered(self) -> None:
        """What failed last works again."""
        with self._lock:
            self._state.last_error = None

    def status(self) -> SubscriberStatus:
        """The status object as of now."""
        with self._lock:
            state = self._state
            return SubscriberStatus(
                id=self.id,
                stream=state.stream,
                boot_id=state.boot_id,
                state="held" if state.paused and state.state == "serving" else state.state,
                reason=self.reason,
                applied_version=state.applied,
                applied_root=state.root,
                applied_at=state.applied_at,
                newest_version=state.newest,
                needs_version=state.needs,
                updated_at=self._clock(),
                renew_seconds=self._renew_seconds,
                last_error=state.last_error,
                refused=[state.refused[v] for v in sorted(state.refused)],
                host=socket.gethostname(),
                release=release_of("deltasync"),
            )

    def timeline(self) -> list[AppliedVersion]:
        """The last applies, oldest first."""
        with self._lock:
            return list(self._state.timeline)


def event(name: str, level: int = logging.INFO, /, **fields: object) -> None:
    """One log line: the event's name and `key=value` pairs."""
    fields = {"server": SERVER.get()} | fields
    parts = [f"{key}={_quoted(value)}" for key, value in fields.items() if value is not None]
    log.log(level, "%s", " ".join([name, *parts]))


def _quoted(value: object) -> str:
    text = str(value)
    plain = text and text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)
