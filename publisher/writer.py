"""Write one stream's versions from watched shards: seal, encode, upload, commit, and never forget a change.

Transaction: changes are *captured* in the step hook, *pending* from `publish` until the outcome is known, and dropped
only once a committed manifest carries them; otherwise they are put back.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from chunkstore.codec import Section
from chunkstore.errors import DeltasyncError
from chunkstore.probe import require_put_if_absent
from chunkstore.store import Store
from manifest.catalog import Catalog
from manifest.errors import ChainError, CommitUnknown, Fenced, ManifestInvalid
from manifest.key_files import load_signer
from manifest.log import VersionLog, create_or_open_stream, put_catalog
from manifest.schema import Manifest, Stats
from manifest.settle import Patience
from publisher.capture import CaptureStats, capture_copies, capture_steps
from publisher.checkpoint import Checkpoint
from publisher.commit import Attempt, Commit, PublishHandle
from publisher.config import PublisherConfig
from publisher.errors import CaptureLost, PublisherStopped
from publisher.find import compile_ahead
from publisher.mapping import verify_against_files
from publisher.optimizers import StepRecord
from publisher.seal import restore, sections, take, whole_sections
from publisher.shard import Shard, Source
from publisher.takeover import check_catalog, claim, reachable
from publisher.upload import Upload

log = logging.getLogger("deltasync.publisher")


class StreamWriter:
    """The writing end of one stream, over shards whose changes it tracks. Not thread-safe.

    `open` first; then any number of `capture` and `publish`; `close` at the end.
    `still`: called after every read of the weights, before what was read is used; raises CaptureLost if somebody may
    have written them meanwhile.
    """

    def __init__(
        self,
        store: Store,
        config: PublisherConfig,
        catalog: Catalog,
        shards: Sequence[Shard],
        still: Callable[[], None] = lambda: None,
    ) -> None:
        self.catalog = catalog
        self.shards = shards
        self._store = store
        self._config = config
        self._stats = CaptureStats()
        self._capture_seconds = 0.0
        self._steps = 0
        self._still = still
        self._lost = False
        self._id = secrets.token_bytes(16)
        self._epoch = 1
        self._base: Manifest | None = None
        self._attempt: Attempt | None = None
        self._stopped: DeltasyncError | None = None
        self._captures = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="deltasync-capture")
        self._uploads = ThreadPoolExecutor(config.upload_threads, thread_name_prefix="deltasync-upload")
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="deltasync-commit")

    @property
    def version(self) -> int:
        """The newest version known to be committed."""
        assert self._base is not None
        return self._base.version

    @property
    def newest(self) -> Commit:
        """The same, with its manifest and the times in that."""
        assert self._base is not None
        return Commit(self._base.version, self._base, dict(self._base.stats.seconds))

    def open(self, checkpoint: Checkpoint | None) -> None:
        """Commit version 0 of an empty stream, or take an existing one over. `checkpoint`: verify the mapping by it.

        Raises MappingMismatch, Fenced, StoreError, StoreUnsuitable, CommitUnknown; then the writer is closed.
        """
        try:
            if any(shard.source in (Source.COPY, Source.INVERSION) for shard in self.shards):
                compile_ahead()
            self._signer = load_signer(self._config.signing)
            require_put_if_absent(self._store)
            stream = create_or_open_stream(self._store)
            patience = Patience(deadline=self._config.commit_deadline)
            self._log = VersionLog(self._store, stream, patience, signer=self._signer)
            newest = self._log.newest()
            if newest is not None:
                self._continue(newest)
                return
            if checkpoint is not None:
                verify_against_files([s.kept_digest for s in self.shards], self.catalog, checkpoint)
            put_catalog(self._store, self.catalog)
            self._first_version()
        except BaseException:  # also Ctrl-C: the threads must not outlive a failed start
            self._shut_down()
            raise

    def capture(self, records: Iterable[tuple[Shard, StepRecord]], copies: Iterable[Shard] = ()) -> None:
        """Account for one optimizer step, before anything else touches the weights or the optimizer's state.

        `records`: what it did to shards found by inversion. `copies`: the shards whose masters it has stepped.
        Raises CaptureLost if they were touched all the same; then track is lost.
        """
        begin = time.perf_counter()
        if self._lost:
            for shard, record in records:
                shard.step = record.step  # nothing to compare with: the digests decide at publish
        else:
            capture_steps(records, self._stats, self._captures)
            capture_copies(copies, self._stats, self._captures)
        try:
            self._still()
        except CaptureLost:
            self.lose_track()
            raise
        self._steps += 1
        self._capture_seconds += time.perf_counter() - begin

    def lose_track(self, steps: int = 0) -> None:
        """`steps` optimizer steps were not captured: the next version sends every block whole whose digest differs."""
        self._lost = True
        self._steps += steps
        for shard in self.shards:
            shard.forget()

    def publish(self, train_step: int | None, *, anchor: bool) -> PublishHandle:
        """See `Publisher.publish`."""
        if self._stopped is not None:
            raise PublisherStopped(f"this publisher has stopped: {self._stopped}") from self._stopped
        self._settle_previous()
        attempt = self._new_attempt(train_step)
        self._send(attempt, anchor)
        return PublishHandle(attempt.future)

    def close(self) -> None:
        """Wait for the last publish. Raises CommitUnknown or Fenced as `publish` does."""
        try:
            if self._stopped is None:
                self._settle_previous()
        finally:
            self._shut_down()
            self._stopped = self._stopped or PublisherStopped("the publisher was closed")

    def _first_version(self) -> None:
        attempt = self._new_attempt(train_step=None)
        self._send(attempt, anchor=False)
        try:
            commit = attempt.future.result()
        except Fenced as error:
            newest = self._log.newest()
            if not self._config.takeover or newest is None:
                raise
            log.warning("version 0 was taken: %s", error)
            self._drop(attempt, put_back=True)
            self._continue(newest)
            return
        assert commit is not None
        self._drop(attempt)
        log.info("version 0 committed: an anchor of %d bytes", commit.manifest.nbytes)

    def _continue(self, newest: Manifest) -> None:
        check_catalog(self._log, self.catalog, newest)
        base = claim(self._log, self.catalog, newest, self._id, insist=self._config.takeover)
        self._base, self._epoch = base, base.epoch
        # Who trusts this publisher's key alone cannot follow what others have signed, or nobody: start anew for them.
        trust = None if self._signer is None else self._signer.trust
        anew = trust is not None and not reachable(
            VersionLog(self._store, self._log.stream, trust=trust), base.version
        )
        differs = 0
        for shard, committed in zip(self.shards, base.digest_array.tolist(), strict=True):
            if anew or shard.kept_digest != committed:
                shard.send_whole()
                differs += 1
        log.info(
            "took the stream over at version %d, epoch %d; %d tensors differ",
            base.version,
            base.epoch,
            differs,
        )

    def _new_attempt(self, train_step: int | None) -> Attempt:
        return Attempt(self._log, self.catalog, self._base, self._epoch, self._id, train_step, self._steps)

    def _send(self, attempt: Attempt, anchor: bool) -> None:
        """Seal and start the attempt. However it is interrupted, its outcome is known afterwards."""
        self._attempt = attempt
        try:
            self._seal_and_start(attempt, anchor)
        except BaseException as error:
            if not attempt.future.done():
                attempt.future.set_exception(error)
            if isinstance(error, CaptureLost):
                self.lose_track()
            if isinstance(error, DeltasyncError):
                return  # the handle tells
            raise

    def _seal_and_start(self, attempt: Attempt, anchor: bool) -> None:
        begin = time.perf_counter()
        budget = self._config.upload_memory_mb << 20
        changes = Upload(self._store, attempt.version, attempt.attempt, self._uploads, budget)
        whole = None
        for shard in self.shards:
            _feed(changes, self._seal(attempt, shard))
        if anchor and self._base is not None:
            version = self._base.version if changes.empty else attempt.version
            whole = Upload(self._store, version, attempt.anchor_attempt, self._uploads, budget)
            for shard in self.shards:
                _feed(whole, whole_sections(shard))
        self._still()
        attempt.seconds = {"capture": self._capture_seconds, "seal": time.perf_counter() - begin}
        attempt.stats = Stats(
            elements=sum(t.numel for t in self.catalog.tensors),
            ambiguous=self._stats.ambiguous,
            unproved_blocks=self._stats.unproved_blocks,
            sources=_sources(self.shards),
        )
        if self._stats.unproved_blocks:
            log.warning(
                "%d unproved blocks are sent whole in version %d",
                self._stats.unproved_blocks,
                attempt.version,
            )
        self._stats, self._capture_seconds, self._steps, self._lost = CaptureStats(), 0.0, 0, False
        attempt.start(self._commits, changes, whole)

    def _seal(self, attempt: Attempt, shard: Shard) -> Iterable[Section]:
        committed = None if self._base is None else int(self._base.digest_array[shard.id])
        sealed = take(shard, committed, self._stats)
        attempt.sealed.append(sealed)
        return sections(sealed, self._stats)

    def _settle_previous(self) -> None:
        """Learn the previous attempt's outcome: keep its base, or put its changes back."""
        attempt = self._attempt
        if attempt is None:
            return
        error = attempt.future.exception()
        if (
            attempt.offered
            and not attempt.committed
            and (isinstance(error, CommitUnknown) or not isinstance(error, DeltasyncError))
        ):
            error = self._settle_unknown(attempt)
        if isinstance(error, Fenced | ChainError | ManifestInvalid) and not attempt.committed:
            self._stopped = error  # what stands at this version is not ours and never will be
            raise error
        if error is not None:
            log.warning("publishing version %d: %s", attempt.version, error)
        self._drop(attempt, put_back=error is not None and not attempt.committed)

    def _settle_unknown(self, attempt: Attempt) -> DeltasyncError | None:
        try:
            attempt.settle()
        except CommitUnknown:
            raise
        except DeltasyncError as error:
            return error
        return None

    def _drop(self, attempt: Attempt, *, put_back: bool = False) -> None:
        """Forget a decided attempt: its version is the new base, or its changes precede those found since."""
        self._attempt = None
        if put_back:
            for sealed in attempt.sealed:
                restore(sealed)
            self._steps += attempt.optimizer_steps
        elif attempt.manifest is not None:
            self._base = attempt.manifest

    def _shut_down(self) -> None:
        self._captures.shutdown()
        self._uploads.shutdown(wait=True, cancel_futures=True)
        self._commits.shutdown(wait=True, cancel_futures=True)


def _sources(shards: Sequence[Shard]) -> dict[str, int]:
    """Elements watched by each source."""
    counts: Counter[str] = Counter()
    for shard in shards:
        counts[shard.source] += shard.numel
    return dict(counts)


def _feed(upload: Upload, parts: Iterable[Section]) -> None:
    for section in parts:
        upload.add(section)
