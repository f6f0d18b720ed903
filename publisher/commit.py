"""One version on its way: chunks to upload, then the manifest to commit, on a background thread."""

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from chunkstore.crashpoints import crash_point
from chunkstore.errors import DeltasyncError
from manifest.catalog import Catalog, root_digest
from manifest.log import VersionLog
from manifest.schema import ChunkRef, Manifest, Stats
from manifest.sections import Sections
from publisher.compact import anchor_of
from publisher.takeover import fenced
from publisher.tracking import Taken
from publisher.upload import Upload, Uploaded

log = logging.getLogger("deltasync.publisher")


@dataclass(frozen=True, slots=True, repr=False)
class Commit:
    """A committed version: its manifest, and seconds per phase (capture, seal, encode, upload, commit).

    `anchored`: it is stored whole beside that, as was asked for.
    """

    version: int
    manifest: Manifest
    seconds: dict[str, float]
    anchored: bool = False

    def __repr__(self) -> str:
        """What a log wants of it: a manifest has a line per tensor and section."""
        made = self.manifest
        changed = f"{made.stats.changed} of {made.stats.elements} elements"
        return f"<version {self.version} ({made.kind}): {changed}, {made.nbytes} bytes>"


class PublishHandle:
    """The outcome of one `publish`, once it is known."""

    def __init__(self, future: "Future[Commit | None]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def when_done(self, call: "Callable[[Future[Commit | None]], None]") -> None:
        """Call `call` with the outcome as soon as it is known, on the thread that learns it."""
        self._future.add_done_callback(call)

    def result(self, timeout: float | None = None) -> Commit | None:
        """The commit, or None if nothing had changed. Waits up to `timeout` seconds (TimeoutError).

        Raises StoreError if the upload failed and CommitUnknown if the outcome is not known; in both cases nothing is
        lost, the next publish carries the changes. Raises Fenced if another publisher has the stream.
        """
        return self._future.result(timeout)


def stats_of(taken: Taken, uploaded: Uploaded) -> Stats:
    """What one writer measured of one version."""
    seconds = {"encode": uploaded.encode_seconds, "upload": uploaded.upload_seconds}
    return taken.stats.model_copy(
        update={
            "changed": uploaded.changed,
            "bytes_by_encoding": dict(uploaded.bytes_by_encoding),
            "seconds": taken.seconds | seconds,
        }
    )


def newest_of(version: int, outcome: "Future[Commit | None] | None") -> int:
    """The newest version known to be committed: `version`, or what the attempt after it is known to have committed."""
    if outcome is None or not outcome.done() or outcome.cancelled() or outcome.exception() is not None:
        return version
    commit = outcome.result()
    return version if commit is None else max(version, commit.version)


@dataclass
class Attempt:
    """One try at one version. `taken` is kept until the commit is known, to be put back if it failed.

    `manifest` and `alternate` are set before they are offered: an unknown commit is settled by offering the same
    bytes again. `offered`: the log may hold it. `committed`: the log is known to hold it.
    """

    log: VersionLog
    catalog: Catalog
    base: Manifest | None
    epoch: int
    publisher: bytes
    train_step: int | None
    attempt: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    anchor_attempt: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    taken: Taken = field(default_factory=Taken)
    seconds: dict[str, float] = field(default_factory=dict)
    manifest: Manifest | None = None
    alternate: Manifest | None = None
    offered: bool = False
    committed: bool = False
    future: "Future[Commit | None]" = field(default_factory=Future)

    @property
    def version(self) -> int:
        return 0 if self.base is None else self.base.version + 1

    def start(self, thread: ThreadPoolExecutor, changes: Upload, anchor: Upload | None) -> None:
        """Finish the uploads and commit in the background; `future` tells the outcome."""
        self.future = thread.submit(self._run, changes, anchor)

    def settle(self) -> Commit:
        """Offer the manifest (again). Raises CommitUnknown, Fenced."""
        assert self.manifest is not None
        begin = time.perf_counter()
        again, self.offered = self.offered, True
        outcome = self.log.commit(self.manifest, again=again)
        if not outcome.won:
            raise fenced(self.log, self.manifest, outcome.winner)
        self.committed = True
        crash_point("publisher.after_manifest")
        anchored = self.alternate is not None and self._put_alternate(self.alternate)
        self.seconds["commit"] = time.perf_counter() - begin
        return Commit(self.manifest.version, self.manifest, dict(self.seconds), anchored)

    def _put_alternate(self, alternate: Manifest) -> bool:
        """Whether it is known to be there. What goes wrong here is no longer about the version."""
        try:
            self.log.put_alternate(alternate)
            crash_point("publisher.after_alternate")
        except DeltasyncError as error:
            log.warning("version %d is committed, but not stored whole: %s", alternate.version, error)
            return False
        return True

    def _run(self, changes: Upload, anchor: Upload | None) -> Commit | None:
        self.seconds = dict(self.taken.seconds)
        uploaded = changes.finish()
        whole = anchor.finish() if anchor is not None else None
        if uploaded.chunks or self.base is None:
            digests = np.array([part.digest for part in self.taken.sealed], dtype="<u8")
            version = self._version(digests, uploaded.chunks, stats_of(self.taken, uploaded))
            self.manifest = self.log.signed(version)
        elif whole is None:
            return None
        else:
            self.manifest = self.base
        if whole is not None:
            self.alternate = self.log.signed(anchor_of(self.manifest, self.anchor_attempt, whole))
        crash_point("publisher.before_manifest")
        return self.settle()

    def _version(self, digests: npt.NDArray[np.uint64], chunks: list[ChunkRef], stats: Stats) -> Manifest:
        """The manifest of what leads from the base to `digests`: an anchor if that is every element."""
        changed = Sections.joined(chunk.sections for chunk in chunks)[-1]
        everything = int(changed.sum())  # if it is all, none is a difference: see `combine`
        anchor = self.base is None or everything == sum(t.numel for t in self.catalog.tensors)
        base = None if anchor else self.base
        self.seconds = dict(stats.seconds)
        return Manifest(
            stream=self.log.stream.id,
            version=self.version,
            kind="anchor" if anchor else "delta",
            base_version=None if base is None else base.version,
            base_root=None if base is None else base.root,
            root=root_digest(self.catalog, digests),
            parent_hash=None if self.base is None else self.base.hash,
            epoch=self.epoch,
            publisher=self.publisher,
            commit_id=secrets.token_bytes(16),
            attempt=self.attempt,
            catalog=self.catalog.hash,
            train_step=self.train_step,
            optimizer_steps=self.taken.optimizer_steps,
            created_at=time.time(),
            digests=digests.astype("<u8").tobytes(),
            chunks=chunks,
            stats=stats,
        )
