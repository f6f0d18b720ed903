"""The publisher in the trainer's process: attach it once, publish after optimizer steps.

Transaction: changes are *captured* in the step hook, *pending* from `publish` until the outcome is known, and dropped
only once a committed manifest carries them; otherwise they are put back.
"""

import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from chunkstore.codec import Section
from chunkstore.config import load_config, parse_config
from chunkstore.errors import DeltasyncError
from chunkstore.open import open_store
from chunkstore.probe import require_put_if_absent
from chunkstore.store import Store
from manifest.catalog import Catalog
from manifest.errors import ChainError, CommitUnknown, Fenced, ManifestInvalid
from manifest.log import VersionLog, create_or_open_stream, put_catalog
from manifest.schema import Manifest, Stats
from manifest.settle import Patience
from publisher.capture import CaptureStats, capture_step
from publisher.checkpoint import Checkpoint
from publisher.commit import Attempt, PublishHandle
from publisher.config import PublisherConfig
from publisher.errors import PublisherStopped
from publisher.mapping import verify_against_files
from publisher.optimizers import step_records
from publisher.seal import restore, sections, take, whole_sections
from publisher.shard import Shard
from publisher.takeover import check_catalog, claim
from publisher.upload import Upload
from publisher.watch import Watched, watch

log = logging.getLogger("deltasync.publisher")


class Publisher:
    """Feeds one stream from one trainer process. Create it with `Publisher.attach`.

    Not thread-safe: call `publish` from the thread that runs `optimizer.step()`.
    """

    def __init__(self, store: Store, config: PublisherConfig, watched: Watched) -> None:
        self._store = store
        self._config = config
        self._watched = watched
        self._stats = CaptureStats()
        self._seconds = {"capture": 0.0}
        self._steps = 0
        self._id = secrets.token_bytes(16)
        self._epoch = 1
        self._base: Manifest | None = None
        self._attempt: Attempt | None = None
        self._stopped: DeltasyncError | None = None
        self._uploads = ThreadPoolExecutor(config.upload_threads, thread_name_prefix="deltasync-upload")
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="deltasync-commit")
        self._hooks: list[Any] = []
        stream = create_or_open_stream(store)
        self._log = VersionLog(store, stream, Patience(deadline=config.commit_deadline))

    @classmethod
    def attach(
        cls,
        optimizer: Optimizer | Sequence[Optimizer],
        model: nn.Module,
        config: PublisherConfig | Mapping[str, Any] | Path | str,
    ) -> Self:
        """Start feeding the stream named in `config` (a path to YAML, a mapping, or a PublisherConfig).

        On an empty stream this commits version 0, an anchor, and returns when it is durable. On an existing one it
        takes the stream over with an empty version; tensors that differ from the newest version go out whole with
        the next publish. Registers a step post-hook on each optimizer.

        Raises ConfigError, OptimizerRefused, MappingMismatch, Fenced, StoreError, CommitUnknown.
        """
        settings = _settings(config)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        checkpoint = Checkpoint.open(settings.base_checkpoint) if settings.base_checkpoint else None
        watched = watch(model, optimizers, checkpoint, settings)
        store = open_store(settings.store)
        require_put_if_absent(store)
        publisher = cls(store, settings, watched)
        try:
            publisher._open(checkpoint)
        except BaseException:
            publisher._shut_down()
            raise
        publisher._hooks = [o.register_step_post_hook(publisher._after_step) for o in optimizers]
        return publisher

    @property
    def version(self) -> int:
        """The newest version known to be committed."""
        assert self._base is not None
        return self._base.version

    @property
    def catalog(self) -> Catalog:
        return self._watched.catalog

    def publish(self, train_step: int | None = None, *, anchor: bool = False) -> PublishHandle:
        """Publish what has changed since the last version; call it after `optimizer.step()`, before the next.

        Waits for the previous publish, then reads the weights once; encoding, upload and commit go on in the
        background. `anchor`: also store this version whole, so that new subscribers start from it.
        Raises what makes further publishing impossible: Fenced, PublisherStopped; CommitUnknown while the previous
        outcome is still not known (nothing is lost: call again). Everything else arrives through the handle.
        """
        self._check_running()
        self._settle_previous()
        self._watched.refresh()
        attempt = self._new_attempt(train_step)
        self._send(attempt, anchor)
        return PublishHandle(attempt.future)

    def close(self) -> None:
        """Wait for the last publish and detach from the optimizers. Raises CommitUnknown or Fenced as `publish`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            if self._stopped is None:
                self._settle_previous()
        finally:
            self._shut_down()
            self._stopped = self._stopped or PublisherStopped("the publisher was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, checkpoint: Checkpoint | None) -> None:
        newest = self._log.newest()
        if newest is None:
            if checkpoint is not None:
                verify_against_files([s.kept_digest for s in self._watched.shards], self.catalog, checkpoint)
            put_catalog(self._store, self.catalog)
            self._first_version()
            return
        self._continue(newest)

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
        differs = 0
        for shard, committed in zip(self._watched.shards, base.digest_array.tolist(), strict=True):
            if shard.kept_digest != committed:
                shard.changes.whole[:] = True
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
        begin = time.perf_counter()
        budget = self._config.upload_memory_mb << 20
        self._attempt = attempt
        changes = Upload(self._store, attempt.version, attempt.attempt, self._uploads, budget)
        whole = None
        try:
            for shard in self._watched.shards:
                _feed(changes, self._seal(attempt, shard))
            if anchor and self._base is not None:
                version = self._base.version if changes.empty else attempt.version
                whole = Upload(self._store, version, attempt.anchor_attempt, self._uploads, budget)
                for shard in self._watched.shards:
                    _feed(whole, whole_sections(shard))
        except BaseException as error:
            attempt.future.set_exception(error)
            if isinstance(error, DeltasyncError):
                return  # the handle tells
            raise
        attempt.seconds = {"capture": self._seconds["capture"], "seal": time.perf_counter() - begin}
        attempt.stats = Stats(
            elements=sum(t.numel for t in self.catalog.tensors),
            ambiguous=self._stats.ambiguous,
            unproved_blocks=self._stats.unproved_blocks,
            sources=self._watched.sources,
        )
        if self._stats.unproved_blocks:
            log.warning(
                "%d unproved blocks are sent whole in version %d",
                self._stats.unproved_blocks,
                attempt.version,
            )
        self._stats, self._seconds, self._steps = CaptureStats(), {"capture": 0.0}, 0
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

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        begin = time.perf_counter()
        with torch.no_grad():
            for parameter, record in step_records(optimizer):
                shard = self._watched.by_parameter.get(id(parameter))
                if shard is not None:
                    capture_step(shard, record, self._stats)
        self._steps += 1
        self._seconds["capture"] += time.perf_counter() - begin

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise PublisherStopped(f"this publisher has stopped: {self._stopped}") from self._stopped

    def _shut_down(self) -> None:
        self._uploads.shutdown(wait=True, cancel_futures=True)
        self._commits.shutdown(wait=True, cancel_futures=True)


def _settings(config: PublisherConfig | Mapping[str, Any] | Path | str) -> PublisherConfig:
    if isinstance(config, PublisherConfig):
        return config
    if isinstance(config, Mapping):
        return parse_config(config, PublisherConfig, source="the config given to Publisher.attach")
    return load_config(Path(config), PublisherConfig)


def _feed(upload: Upload, parts: Iterable[Section]) -> None:
    for section in parts:
        upload.add(section)
