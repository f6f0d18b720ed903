"""Write one stream's versions from watched shards: seal, encode, upload, commit, and never forget a change.

Transaction: changes are *captured* in the step hook, *pending* from `publish` until the outcome is known, and dropped
only once a committed manifest carries them; otherwise they are put back.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from chunkstore.crashpoints import crash_point
from chunkstore.errors import DeltasyncError
from chunkstore.probe import require_put_if_absent
from chunkstore.store import Store
from manifest.catalog import Catalog
from manifest.checkpoint import Checkpoint
from manifest.errors import ChainError, CommitUnknown, Fenced, ManifestInvalid
from manifest.key_files import load_signer
from manifest.keys import chunk_key
from manifest.log import VersionLog, create_or_open_stream, put_catalog
from manifest.schema import Manifest
from manifest.settle import Patience
from publisher.capture import Copies
from publisher.commit import Attempt, Commit, PublishHandle, newest_of
from publisher.config import PublisherConfig
from publisher.errors import CaptureLost, PublisherStopped
from publisher.mapping import verify_against_files
from publisher.optimizers import StepRecord
from publisher.shard import Shard
from publisher.takeover import claim, fenced, reachable, reference_version
from publisher.tracking import Tracking
from publisher.upload import Upload

log = logging.getLogger("deltasync.publisher")


class StreamWriter:
    """The writing end of one stream, over shards whose changes it tracks. Not thread-safe.

    `open` first; then any number of `capture` and `publish`; `close` at the end.
    `still`: see `Tracking`.
    """

    _attempt: Attempt | None

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
        self._tracking = Tracking(catalog, shards, still)
        self._id = secrets.token_bytes(16)
        self._epoch = 1
        self._base: Manifest | None = None
        self._attempt: Attempt | None = None
        self._stopped: DeltasyncError | None = None
        self._uploads = ThreadPoolExecutor(config.upload_threads, thread_name_prefix="deltasync-upload")
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="deltasync-commit")

    @property
    def version(self) -> int:
        """The newest version known to be committed."""
        assert self._base is not None
        return newest_of(self._base.version, None if self._attempt is None else self._attempt.future)

    @property
    def base(self) -> Commit:
        """What the next version builds on, with its manifest and the times in that."""
        assert self._base is not None
        return Commit(self._base.version, self._base, dict(self._base.stats.seconds))

    def open(self, checkpoint: Checkpoint | None) -> None:
        """Commit version 0 of an empty stream, or take an existing one over. `checkpoint`: verify the mapping by it.

        Raises MappingMismatch, Fenced, StoreError, StoreUnsuitable, CommitUnknown; then the writer is closed.
        """
        try:
            base = self._begin(checkpoint)
            if base is not None:
                self._continue(base)
            elif self._config.refer_to_base:
                self._refer()
            else:
                self._first_version()
        except BaseException:  # also Ctrl-C: the threads must not outlive a failed start
            self._shut_down()
            raise

    def capture(
        self,
        records: Iterable[tuple[Shard, StepRecord]],
        copies: Copies = (),
        *,
        begins: bool = True,
    ) -> None:
        """See `Tracking.capture`."""
        self._tracking.capture(records, copies, begins=begins)

    def lose_track(self, steps: int = 0) -> None:
        """See `Tracking.lose_track`."""
        self._tracking.lose_track(steps)

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

    def _begin(self, checkpoint: Checkpoint | None) -> Manifest | None:
        """Open the stream and claim it; the version that this continues, None if there is none."""
        self._tracking.prepare()
        self._signer = load_signer(self._config.signing)
        require_put_if_absent(self._store)
        stream = create_or_open_stream(self._store)
        patience = Patience(deadline=self._config.commit_deadline)
        self._log = VersionLog(self._store, stream, patience, signer=self._signer)
        newest = self._log.newest()
        if newest is not None:
            return self._claim(newest)
        self._verify_start(checkpoint)
        put_catalog(self._store, self.catalog)
        return None

    def _verify_start(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            verify_against_files([s.kept_digest for s in self.shards], self.catalog, checkpoint)

    def _refer(self) -> None:
        """Commit version 0 as a reference to the base checkpoint, which has just been compared with the shards."""
        digests = [shard.kept_digest for shard in self.shards]
        first = self._log.signed(reference_version(self._log.stream.id, self.catalog, digests, self._id))
        crash_point("publisher.before_reference")
        outcome = self._log.commit(first)
        crash_point("publisher.after_reference")
        if not outcome.won:
            error = fenced(self._log, first, outcome.winner)
            if not self._config.takeover:
                raise error
            log.warning("version 0 was taken: %s", error)
            self._continue(self._claim(outcome.winner))
            return
        self._base, self._epoch = first, first.epoch
        log.info("version 0 committed: a reference to the base checkpoint")

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
            self._continue(self._claim(newest))
            return
        assert commit is not None
        self._drop(attempt)
        log.info("version 0 committed: an anchor of %d bytes", commit.manifest.nbytes)

    def _claim(self, newest: Manifest) -> Manifest:
        return claim(self._log, self.catalog, newest, self._id, insist=self._config.takeover)

    def _continue(self, base: Manifest) -> None:
        """From the version that claimed the stream."""
        self._base, self._epoch = base, base.epoch
        differs = self._compare(base, everything=self._starts_anew(base))
        self._tracking.send_whole(differs)
        log.info(
            "took the stream over at version %d, epoch %d; %d tensors differ",
            base.version,
            base.epoch,
            len(differs),
        )
        if 0 < len(differs) < len(self.catalog.tensors):
            names = [self.catalog.tensors[number].name for number in differs]
            log.warning(
                "%d of %d tensors differ from version %d: %s. If training resumes from that very version, they are not "
                "mapped to the right places; from another one, they are just its weights",
                len(names),
                len(self.catalog.tensors),
                base.version,
                ", ".join(names[:10]),
            )

    def _compare(self, base: Manifest, *, everything: bool) -> list[int]:
        """Ids of the tensors that are not what `base` holds, or of all."""
        pairs = zip(self.shards, base.digest_array.tolist(), strict=True)
        return [shard.id for shard, committed in pairs if everything or shard.kept_digest != committed]

    def _starts_anew(self, base: Manifest) -> bool:
        """Who trusts this publisher's key alone cannot follow what others have signed, or nobody: an anchor is due."""
        if self._signer is None:
            return False
        theirs = VersionLog(self._store, self._log.stream, trust=self._signer.trust)
        return not reachable(theirs, base.version)

    def _new_attempt(self, train_step: int | None) -> Attempt:
        return Attempt(self._log, self.catalog, self._base, self._epoch, self._id, train_step)

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
        changes = self._upload(attempt.version, attempt.attempt)
        self._tracking.take(attempt.taken, changes, self._committed)
        whole = None
        if anchor and self._base is not None:
            version = self._base.version if changes.empty else attempt.version
            whole = self._upload(version, attempt.anchor_attempt)
            self._tracking.take_whole(whole)
        self._tracking.finish(attempt.taken, begin)
        attempt.start(self._commits, changes, whole)

    def _upload(self, version: int, attempt: bytes) -> Upload:
        key = partial(chunk_key, version, attempt, 0)
        return Upload(self._store, key, self._uploads, self._config.upload_memory_mb << 20)

    def _committed(self, shard: Shard) -> int | None:
        """The digest of what `shard` holds in the base; None without a base."""
        return None if self._base is None else int(self._base.digest_array[shard.id])

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
            self._tracking.put_back(attempt.taken)
        elif attempt.manifest is not None:
            self._base = attempt.manifest

    def _shut_down(self) -> None:
        self._tracking.close()
        self._uploads.shutdown(wait=True, cancel_futures=True)
        self._commits.shutdown(wait=True, cancel_futures=True)
