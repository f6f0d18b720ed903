"""Anchors of the publisher process: a thread that stores the newest version whole when the policy or a refusal says so.

Never the trainer's work, and never in its way: it runs at the lowest priority, beside captures and uploads.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from chunkstore.errors import DeltasyncError, ObjectMissing
from chunkstore.store import Store
from manifest.checkpoint import Checkpoint
from manifest.log import VersionLog, open_stream, read_catalog
from manifest.schema import Manifest
from manifest.signing import Signer
from publisher.compact import compact
from publisher.config import AnchorConfig
from publisher.errors import PublisherStopped
from publisher.messages import ErrorInfo
from publisher.refusals import Refusals
from publisher.report import Report

log = logging.getLogger("deltasync.publisher")

_LOOK: Final = 10.0  # seconds between looks at the log
_LONGEST_PAUSE: Final = 3600.0  # seconds between tries of what keeps failing


@dataclass(frozen=True, slots=True)
class Chain:
    """`versions` since the newest anchor, `nbytes` of them all; `anchor_nbytes` of that anchor, None if unknown."""

    versions: int
    nbytes: int
    anchor_nbytes: int | None

    def due(self, config: AnchorConfig) -> bool:
        """Whether an anchor of the newest version pays."""
        if not self.versions or self.anchor_nbytes is None:
            return False
        return (config.every is not None and self.versions >= config.every) or (
            config.chain_weight is not None and self.nbytes > config.chain_weight * self.anchor_nbytes
        )


class ChainGauge:
    """Measures the chain, reading every manifest once."""

    def __init__(self, versions: VersionLog) -> None:
        self._log = versions
        self._sizes: dict[int, tuple[int, bool]] = {}  # version → bytes, and whether it is whole

    def measure(self, newest: Manifest) -> Chain:
        """The chain that ends at `newest`. Raises the store's errors, ManifestInvalid, FormatUnsupported."""
        alternates = set(self._log.alternates())
        count = nbytes = 0
        for version in range(newest.version, -1, -1):
            if version in alternates:
                alternate = self._log.read_alternate(version)
                return self._end(version, count, nbytes, None if alternate is None else alternate.nbytes)
            if version not in self._sizes:
                manifest = newest if version == newest.version else self._log.read(version)
                if manifest is None:
                    break
                self._sizes[version] = (self._size(manifest), manifest.kind != "delta")
            size, whole = self._sizes[version]
            if whole:
                return self._end(version, count, nbytes, size)
            count, nbytes = count + 1, nbytes + size
        return Chain(count, nbytes, None)

    def _size(self, manifest: Manifest) -> int:
        if manifest.kind != "reference":
            return manifest.nbytes
        return read_catalog(self._log.store, manifest.catalog).nbytes  # what an anchor will about weigh

    def _end(self, version: int, count: int, nbytes: int, anchor_nbytes: int | None) -> Chain:
        self._sizes = {v: size for v, size in self._sizes.items() if v >= version}
        return Chain(count, nbytes, anchor_nbytes)


class RoutineAnchors:
    """The thread, while the `with` block runs; leaving it stops a compaction before its next chunk.

    `base`: the checkpoint that version 0 may refer to. `refusals`: answered as well; None where the trainer does.
    """

    def __init__(
        self,
        store: Store,
        config: AnchorConfig,
        signer: Signer | None,
        report: Report,
        look: float = _LOOK,
        base: Path | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._signer = signer
        self._report = report
        self._look = look
        self._base = base
        self._refusals = refusals
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deltasync-anchors", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # only Linux has priorities of threads; uploads inherit it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        failures = 0
        gauge: ChainGauge | None = None
        versions: VersionLog | None = None
        while not self._stop.wait(min(self._look * 2.0 ** min(failures, 30), _LONGEST_PAUSE)):
            try:
                # Anew each time: a prefix can be deleted and created again as another stream.
                try:
                    stream = open_stream(self._store)
                except ObjectMissing:  # not yet
                    continue
                if versions is None or gauge is None or versions.stream != stream:
                    trust = None if self._signer is None else self._signer.trust
                    versions = VersionLog(self._store, stream, trust=trust, signer=self._signer)
                    gauge = ChainGauge(versions)
                self._round(versions, gauge)
                failures = 0
            except PublisherStopped:
                return
            except DeltasyncError as error:
                failures += 1
                self._report.failed(ErrorInfo.of(error))
                log.warning("no routine anchor: %s", error)

    def _round(self, versions: VersionLog, gauge: ChainGauge) -> None:
        newest = versions.newest()
        if newest is None or not (gauge.measure(newest).due(self._config) or self._refused()):
            return
        begin = time.perf_counter()
        anchor = compact(
            versions,
            newest.version,
            self._config.grace,
            scratch=self._config.scratch,
            base=None if self._base is None else Checkpoint.open(self._base),
            check=self._check_running,
        )
        self._report.metrics.anchors.inc()
        if self._refusals is not None:
            self._refusals.answered(anchor.version)
        seconds = time.perf_counter() - begin
        log.info("stored version=%d whole bytes=%d seconds=%.1f", anchor.version, anchor.nbytes, seconds)

    def _refused(self) -> bool:
        if self._refusals is None:
            return False
        self._refusals.look()
        return self._refusals.wanted

    def _check_running(self) -> None:
        if self._stop.is_set():
            raise PublisherStopped("the publisher process stops")
