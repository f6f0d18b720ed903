"""One trainer's connection: its requests, carried out on the weights it shares, one after the other."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from chunkstore.crashpoints import crash_point
from chunkstore.errors import DeltasyncError
from chunkstore.store import Store
from manifest.catalog import Catalog
from manifest.checkpoint import Checkpoint
from publisher.adapters.base import Piece
from publisher.commit import Commit
from publisher.config import PublisherConfig
from publisher.errors import CaptureLost, MappingMismatch, SpoolInvalid
from publisher.frames import Frames
from publisher.inversion import Hyper
from publisher.mapping import castable
from publisher.messages import (
    REQUEST,
    Alive,
    Close,
    Done,
    ErrorInfo,
    Failed,
    GroupRecord,
    Open,
    Publish,
    Result,
    Step,
    parse,
)
from publisher.optimizers import StepRecord
from publisher.refusals import Refusals
from publisher.report import Report
from publisher.shard import Shard, Source
from publisher.spool import MappedState, Moment
from publisher.watch import WatchPlan, make_shards
from publisher.writer import StreamWriter

log = logging.getLogger("deltasync.publisher")

_FIRST_MESSAGE: Final = 10.0
"""Seconds within which whoever connects has to say what they want."""


class Session:
    """One trainer, from its first message to the end of its connection."""

    def __init__(
        self, config: PublisherConfig, store: Store, spool: Path, frames: Frames, report: Report
    ) -> None:
        self._config = config
        self._store = store
        self._spool = spool
        self._frames = frames
        self._report = report
        self._seq = 0
        self._state: MappedState | None = None
        self._writer: StreamWriter | None = None
        self._refusals = Refusals(store)

    def run(self) -> None:
        """Serve until the trainer leaves. What it does wrong ends its session, never this process."""
        try:
            self._serve()
        except (DeltasyncError, TimeoutError) as error:
            log.error("the trainer's connection is ended: %s", error)
            self._answer(Failed(seq=None, error=self._failure(error)))
        finally:
            self._leave()

    def _serve(self) -> None:
        raw = self._frames.receive(within=_FIRST_MESSAGE)
        while raw is not None:
            request = parse(raw, REQUEST)
            if isinstance(request, Open) is (self._writer is not None):
                raise SpoolInvalid("a trainer begins with 'open', and says it once")
            if not self._carry_out(request) and self._writer is None:
                return
            if isinstance(request, Close):
                return
            raw = self._frames.receive()

    def _carry_out(self, request: Open | Step | Publish | Close) -> bool:
        """Do what is asked and say so; False if it failed."""
        self._seq = request.seq
        try:
            if isinstance(request, Open):
                with self._signs_of_life():
                    self._open(request)
            elif isinstance(request, Step):
                self._capture(request)
            elif isinstance(request, Publish):
                self._publish(request)
            else:
                with self._signs_of_life():
                    self._opened.close()
        except SpoolInvalid:
            raise
        except DeltasyncError as error:
            log.warning("%s: %s", request.kind, error)
            self._answer(Failed(seq=request.seq, error=self._failure(error)))
            return False
        self._answer(Done(seq=request.seq, version=self._opened.version))
        return True

    def _failure(self, error: BaseException) -> ErrorInfo:
        info = ErrorInfo.of(error)
        self._report.failed(info)
        return info

    @property
    def _opened(self) -> StreamWriter:
        assert self._writer is not None
        return self._writer

    def _open(self, request: Open) -> None:
        catalog = Catalog.from_bytes(request.catalog)
        self._state = MappedState.open(self._spool, request.state)
        tensors = _tensors(catalog, request, self._state)
        checkpoint = (
            Checkpoint.open(self._config.base_checkpoint, MappingMismatch)
            if self._config.base_checkpoint
            else None
        )
        pieces = [Piece(spec.name, tensor) for spec, tensor in zip(catalog.tensors, tensors, strict=True)]
        shards = make_shards(WatchPlan(catalog, tuple(pieces), tuple(request.sources), tuple(request.steps)))
        self._still()
        writer = StreamWriter(self._store, self._config, catalog, shards, self._still)
        writer.open(checkpoint)
        self._writer = writer
        self._report.opened(writer.base)
        log.info("a trainer shares %d tensors in state %s", len(shards), request.state)
        crash_point("sidecar.opened")

    def _capture(self, request: Step) -> None:
        records = list(self._records(request.groups))
        try:
            self._still()
        except CaptureLost:
            self._opened.lose_track()
            raise
        self._opened.capture(records)
        crash_point("sidecar.captured")

    def _publish(self, request: Publish) -> None:
        records = list(self._records(request.groups))
        self._still()
        if request.missed:
            self._opened.lose_track(request.missed)
        for shard, record in records:
            shard.step = record.step
        anchor = request.anchor or self._refusals.wanted
        handle = self._opened.publish(request.train_step, anchor=anchor)
        crash_point("sidecar.sealed")
        handle.when_done(lambda future: self._tell(request.seq, future))
        self._refusals.after(handle)

    def _tell(self, seq: int, future: "Future[Commit | None]") -> None:
        """On the thread that commits."""
        error = future.exception()
        if error is not None:
            if not isinstance(error, DeltasyncError):
                log.error("publishing failed", exc_info=error)
            self._answer(Result(seq=seq, error=self._failure(error)))
            return
        commit = future.result()
        if commit is None:
            self._answer(Result(seq=seq))
            return
        manifest = commit.manifest
        self._report.committed(commit)
        log.info(
            "committed version=%d changed=%d bytes=%d unproved_blocks=%d %s",
            commit.version,
            manifest.stats.changed,
            manifest.nbytes,
            manifest.stats.unproved_blocks,
            " ".join(f"{phase}_seconds={seconds:.3f}" for phase, seconds in commit.seconds.items()),
        )
        self._answer(
            Result(seq=seq, manifest=manifest.data, seconds=commit.seconds, anchored=commit.anchored)
        )

    def _records(self, groups: Sequence[GroupRecord]) -> Iterator[tuple[Shard, StepRecord]]:
        shards, moments = self._opened.shards, self._mapped.moments
        for group in groups:
            hyper = Hyper(group.lr, group.beta1, group.beta2, group.eps, group.weight_decay)
            for number, step in zip(group.tensors, group.steps, strict=True):
                if number >= len(shards) or shards[number].source is not Source.INVERSION:
                    raise SpoolInvalid(f"a step names tensor {number}, which is not found by inversion")
                known = moments[shards[number].spec.name]
                v = known.get("max_exp_avg_sq" if group.amsgrad else "exp_avg_sq")
                yield shards[number], StepRecord(step, hyper, known.get("exp_avg"), v)

    @property
    def _mapped(self) -> MappedState:
        assert self._state is not None
        return self._state

    def _still(self) -> None:
        """Raises CaptureLost unless the trainer has held still for the current request all along."""
        if self._mapped.file.held_for != self._seq:
            raise CaptureLost(
                "the trainer went on before its weights had been read",
                hint="nothing is lost; should it happen again, raise capture_timeout or upload_memory_mb",
            )

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Within, tell the trainer now and then that the work goes on: it may take as long as an upload."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(min(1.0, self._config.capture_timeout / 4)):
                self._answer(Alive())

        thread = threading.Thread(target=beat, name="deltasync-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _answer(self, message: Alive | Done | Failed | Result) -> None:
        try:
            self._frames.send(message.model_dump())
        except OSError as error:
            log.info("the trainer is gone: %s", error)

    def _leave(self) -> None:
        """Whatever the trainer published last is brought to its end."""
        if self._writer is None:
            return
        try:
            self._writer.close()
        except DeltasyncError as error:
            log.error("the last version: %s", error)
        self._report.left()
        log.info("the trainer has left at version %d", self._writer.version)


def _tensors(catalog: Catalog, request: Open, state: MappedState) -> list[torch.Tensor]:
    """The shared tensor of each catalog tensor. Raises SpoolInvalid naming those that cannot be watched as asked."""
    if not len(catalog.tensors) == len(request.sources) == len(request.steps):
        raise SpoolInvalid("'open' needs one source and one step count per catalog tensor")
    found, problems = [], []
    for spec, source in zip(catalog.tensors, request.sources, strict=True):
        tensor = state.tensors.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape:
            problems.append(f"{spec.name} is not shared in shape {spec.shape}")
        elif not castable(tensor.dtype, spec.dtype):
            problems.append(f"{spec.name} is {tensor.dtype} and cannot be sent as {spec.dtype}")
        elif source is not Source.DIGEST and not spec.sparse:
            problems.append(f"{spec.name} is {spec.dtype}, which cannot have source {source}")
        elif source is Source.COPY:
            problems.append(f"{spec.name} has source copy, but masters are not shared")
        elif source is Source.INVERSION and not _invertible(tensor, state.moments.get(spec.name)):
            problems.append(f"{spec.name} has no fp32 master with fp32 moments of its shape")
        else:
            found.append(tensor)
    if problems:
        raise SpoolInvalid("the trainer shares what cannot be watched: " + "; ".join(problems[:10]))
    return found


def _invertible(tensor: torch.Tensor, moments: Mapping[Moment, torch.Tensor] | None) -> bool:
    return bool(moments) and all(
        t.dtype == torch.float32 and t.shape == tensor.shape for t in (tensor, *(moments or {}).values())
    )
