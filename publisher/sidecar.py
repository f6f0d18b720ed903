"""The trainer's face of a publisher process: share the state once, then only say what happened.

The process reads the shared weights while the trainer holds still for a numbered request, never longer than
`capture_timeout`. Whatever is missed that way costs bytes, not correctness: digests decide what the next version sends.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from chunkstore.errors import Action, DeltasyncError
from manifest.catalog import Catalog
from manifest.errors import CommitUnknown
from manifest.naming import canonical_tensors
from publisher.commit import PublishHandle, newest_of
from publisher.config import PublisherConfig
from publisher.errors import CaptureLost, MappingMismatch, PublisherStopped, SidecarBusy, SidecarUnavailable
from publisher.link import Link, Outcome
from publisher.mapping import check_still_fits
from publisher.messages import Close, GroupRecord, Open, Publish, Step
from publisher.optimizers import hyper_of, steps_taken
from publisher.share import SharedState, share_optimizer_state
from publisher.watch import WatchPlan

log = logging.getLogger("deltasync.publisher")


class SidecarFeed:
    """Steps and publishes of one trainer, on their way to the publisher process. Create it with `connect`.

    `_missed`: steps that the process has not captured; as long as there are any, further steps need not be told.
    """

    def __init__(
        self,
        plan: WatchPlan,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        shared: SharedState,
        link: Link,
        spool: Path,
        timeout: float,
    ) -> None:
        self._plan = plan
        self._model = model
        self._optimizers = optimizers
        self._shared = shared
        self._link = link
        self._spool = spool
        self._timeout = timeout
        self._inverted = plan.inverted
        self._numbers = itertools.count(1)
        self._missed = 0
        self._version = 0
        self._previous: Outcome | None = None
        self._closed = False

    @classmethod
    def connect(
        cls,
        plan: WatchPlan,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        config: PublisherConfig,
        spool: Path,
    ) -> "SidecarFeed":
        """Share the state, find the publisher process, and let it open the stream.

        Raises SidecarUnavailable if there is none after `capture_timeout` seconds; OptimizerRefused, LocalDiskError;
        and what opening the stream raises. Then the state stays where it was moved, but nobody else can map it.
        """
        # Before connecting: moving a large state takes longer than the process waits for whoever connects.
        shared = share_optimizer_state(optimizers, model, spool)
        try:
            link = Link.connect(spool, config.capture_timeout, wait=True)
            try:
                feed = cls(plan, model, optimizers, shared, link, spool, config.capture_timeout)
                feed._open(total=None)
            except BaseException:  # whatever it was, the connection must not keep the next trainer out
                link.close()
                raise
        except BaseException:  # whatever it was, nobody will use this memory
            shared.file.remove()
            raise
        return feed

    @property
    def version(self) -> int:
        return newest_of(self._version, self._previous)

    @property
    def catalog(self) -> Catalog:
        return self._plan.catalog

    def after_step(self, optimizer: Optimizer) -> None:
        """Let the step be captured. If that fails, training goes on, and the log says so once."""
        if self._missed or self._link.ended:
            self._miss("the publisher process has hung up or died")
            return
        seq = next(self._numbers)
        try:
            self._bring_home(optimizer)
            with self._shared.file.held(seq):
                self._link.request(Step(seq=seq, groups=list(self._groups(optimizer))), self._timeout)
        except (CaptureLost, SidecarUnavailable, MappingMismatch) as error:  # the last: publish() says so
            self._miss(str(error))

    def publish(self, train_step: int | None, *, anchor: bool) -> PublishHandle:
        if self._closed:
            raise PublisherStopped("this publisher has stopped: the publisher was closed")
        outcome: Outcome = Future()
        try:
            self._wait_for_previous()
            self._refresh()
            self._reconnect()
            self._request(train_step, anchor, outcome)
        except DeltasyncError as error:
            if error.action is not Action.RETRY or isinstance(error, CommitUnknown):
                raise
            log.warning("not published: %s", error)
            outcome = Future()
            outcome.set_exception(error)
        else:
            self._previous = outcome
        return PublishHandle(outcome)

    def close(self) -> None:
        """Wait for the last publish and remove the shared files; the weights stay where they are, in memory."""
        if self._closed:
            return
        self._closed = True
        pending = self._previous is not None and not self._previous.done()
        try:
            if not self._link.ended:
                self._link.request(Close(seq=next(self._numbers)), None)
        except SidecarUnavailable as error:
            if pending:
                raise
            log.warning("closing: %s", error)
        finally:
            self._link.close()
            self._shared.file.remove()

    def _open(self, total: float | None) -> None:
        seq = next(self._numbers)
        message = Open(
            seq=seq,
            state=self._shared.file.id,
            catalog=self.catalog.data,
            sources=list(self._plan.sources),
            steps=self._steps(),
        )
        with self._shared.file.held(seq):
            self._version = self._link.request(message, total)
        self._missed = 0

    def _wait_for_previous(self) -> None:
        if self._previous is not None and not wait([self._previous], self._timeout).done:
            raise SidecarBusy(
                f"the version before is still being uploaded after {self._timeout:g} s: this one was not sealed",
                hint="nothing is lost, its changes are in the next version; publish less often, or look at the store",
            )

    def _refresh(self) -> None:
        check_still_fits(canonical_tensors(self._model), self.catalog)
        for optimizer in self._optimizers:
            self._bring_home(optimizer)
        with torch.no_grad():
            self._shared.refresh(self._model)

    def _reconnect(self) -> None:
        if not self._link.ended:
            return
        self._link.close()
        self._link = Link.connect(self._spool, self._timeout, wait=False)
        try:
            self._open(self._timeout)
        except BaseException:  # whatever it was, a half-open session is of no use
            self._link.close()
            raise
        log.info("the publisher process is back, at version %d", self._version)

    def _request(self, train_step: int | None, anchor: bool, outcome: Outcome) -> None:
        seq = next(self._numbers)
        groups = [g for o in self._optimizers for g in self._groups(o)] if self._missed else []
        message = Publish(seq=seq, train_step=train_step, anchor=anchor, missed=self._missed, groups=groups)
        with self._shared.file.held(seq):
            self._version = self._link.request(message, self._timeout, outcome)
        self._missed = 0

    def _miss(self, reason: str) -> None:
        if not self._missed:
            log.warning("capture lost, the next version sends what differs whole: %s", reason)
        self._missed += 1

    def _bring_home(self, optimizer: Optimizer) -> None:
        """Weights and moments may have been given other memory: a reload, an assignment to `.data`."""
        names = self._plan.catalog.tensors
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    number = self._inverted.get(id(parameter))
                    if number is not None:
                        self._shared.bring_home(names[number].name, parameter)
                        self._shared.bring_moments_home(names[number].name, optimizer.state[parameter])

    def _groups(self, optimizer: Optimizer) -> Iterator[GroupRecord]:
        for group in optimizer.param_groups:
            watched = [p for p in group["params"] if id(p) in self._inverted]
            if watched:
                yield GroupRecord(
                    **asdict(hyper_of(group)),
                    amsgrad=bool(group.get("amsgrad")),
                    tensors=[self._inverted[id(p)] for p in watched],
                    steps=[steps_taken(optimizer.state[p]) for p in watched],
                )

    def _steps(self) -> list[int]:
        steps = [0] * len(self.catalog.tensors)
        for group in (g for o in self._optimizers for g in self._groups(o)):
            for number, step in zip(group.tensors, group.steps, strict=True):
                steps[number] = step
        return steps
