"""What the publisher process tells people: one place that counts and remembers for its HTTP server."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version as release_of
from typing import Final

from pydantic import BaseModel, ConfigDict

from chunkstore.http import Answers, html_page
from chunkstore.metrics import StoreMetrics
from publisher.commit import Commit
from publisher.messages import ErrorInfo
from publisher.metrics import PHASES, Metrics

TIMELINE: Final = 100  # versions remembered for the status page


class LastError(BaseModel):
    """An error, and when it happened, in Unix seconds."""

    model_config = ConfigDict(frozen=True)
    kind: str
    message: str
    hint: str
    at: float


class PublisherStatus(BaseModel):
    """What /status says. `stream`, `epoch`, `committed_*`: of the newest version known to be committed."""

    model_config = ConfigDict(frozen=True)
    trainer_connected: bool
    stream: str | None
    epoch: int | None
    committed_version: int | None
    committed_root: str | None
    committed_at: float | None
    last_error: LastError | None
    host: str
    release: str


class Report:
    """Safe to use from any thread. `clock`: Unix seconds. `expects_trainer`: without one it is not ready."""

    def __init__(
        self, store: StoreMetrics, clock: Callable[[], float] = time.time, *, expects_trainer: bool = True
    ) -> None:
        self.metrics = Metrics(store)
        self._expects_trainer = expects_trainer
        self._clock = clock
        self._lock = threading.Lock()
        self._connected = False
        self._timeline: deque[Commit] = deque(maxlen=TIMELINE)
        self._last_error: LastError | None = None

    def opened(self, first: Commit) -> None:
        """A trainer's stream is open; `first`: the version that opening it committed."""
        with self._lock:
            self._connected = True
        self.metrics.trainer_connected.set(1)
        self.metrics.trainers.inc()
        self.committed(first)

    def committed(self, commit: Commit) -> None:
        with self._lock:
            self._timeline.append(commit)
            self._last_error = None
        self.metrics.committed(commit)

    def failed(self, error: ErrorInfo) -> None:
        with self._lock:
            self._last_error = LastError(**error.model_dump(), at=self._clock())
        self.metrics.errors.labels(error.kind).inc()

    def left(self) -> None:
        """There is no trainer any more."""
        with self._lock:
            self._connected = False
        self.metrics.trainer_connected.set(0)

    def status(self) -> PublisherStatus:
        with self._lock:
            newest = self._timeline[-1].manifest if self._timeline else None
            return PublisherStatus(
                trainer_connected=self._connected,
                stream=newest and newest.stream.hex(),
                epoch=newest and newest.epoch,
                committed_version=newest and newest.version,
                committed_root=newest and newest.root.hex(),
                committed_at=newest and newest.created_at,
                last_error=self._last_error,
                host=socket.gethostname(),
                release=release_of("deltasync"),
            )

    def answers(self) -> Answers:
        """For the HTTP server."""
        return Answers(
            unready=lambda: (
                "no trainer is connected" if self._expects_trainer and not self._connected else None
            ),
            status=lambda: self.status().model_dump_json(indent=1),
            metrics=self.metrics.text,
            page=self.page,
        )

    def page(self) -> str:
        """The status page: what is published for whom, what is wrong, and the versions, newest first."""
        status = self.status()
        error = status.last_error
        facts = {
            "trainer": "connected" if status.trainer_connected else "none",
            "stream": status.stream or "none",
            "committed version": status.committed_version,
            "last error": f"{error.kind}: {error.message}" if error else "none",
        }
        columns = ("version", "ago", "kind", "bytes", "changed", "unproved blocks", *PHASES)
        with self._lock:
            timeline = list(self._timeline)
        return html_page("deltasync publisher", facts, columns, map(self._row, reversed(timeline)))

    def _row(self, commit: Commit) -> list[object]:
        manifest, stats = commit.manifest, commit.manifest.stats
        times = (f"{commit.seconds[phase]:.3f}" if phase in commit.seconds else "" for phase in PHASES)
        ago = f"{self._clock() - manifest.created_at:.0f} s"
        facts = (ago, manifest.kind, f"{manifest.nbytes:,}", f"{stats.changed:,}", stats.unproved_blocks)
        return [commit.version, *facts, *times]
