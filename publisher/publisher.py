"""The publisher in the trainer's process: attach it once, publish after optimizer steps."""

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.optim import Optimizer

from chunkstore.errors import ConfigError
from chunkstore.open import open_store
from chunkstore.store import Store
from manifest.catalog import Catalog
from publisher.adapters.base import Adapter
from publisher.adapters.plain import Masters
from publisher.commit import PublishHandle
from publisher.config import PublisherConfig
from publisher.coordinator import Coordinator
from publisher.errors import MappingMismatch, PublisherStopped
from publisher.given import Given, read_given
from publisher.group import Writer
from publisher.member import Member
from publisher.optimizers import check_not_capturing
from publisher.ownership import whole
from publisher.refusals import Refusals
from publisher.sidecar import SidecarFeed
from publisher.watch import Watched
from publisher.writer import StreamWriter

log = logging.getLogger("deltasync.publisher")


class Feed(Protocol):
    """What a trainer's steps and publishes go to."""

    @property
    def version(self) -> int: ...

    @property
    def catalog(self) -> Catalog: ...

    def after_step(self, optimizer: Optimizer) -> None: ...

    def publish(self, train_step: int | None, *, anchor: bool) -> PublishHandle: ...

    def close(self) -> None: ...


class LocalFeed:
    """Everything in the trainer's own process.

    `refusals`: answered with an anchor; None where several writers feed the stream, which make none: see
    `publisher.anchors`.
    """

    def __init__(self, writer: StreamWriter | Member, watched: Watched, refusals: Refusals | None) -> None:
        self._writer = writer
        self._watched = watched
        self._refusals = refusals

    @property
    def version(self) -> int:
        return self._writer.version

    @property
    def catalog(self) -> Catalog:
        return self._watched.catalog

    def after_step(self, optimizer: Optimizer) -> None:
        if self._watched.follows_steps:
            check_not_capturing()
        with torch.no_grad():
            self._writer.capture(
                self._watched.records(optimizer),
                self._watched.copies(optimizer),
                begins=self._watched.adapter.begins_step(optimizer),
            )

    def publish(self, train_step: int | None, *, anchor: bool) -> PublishHandle:
        self._watched.refresh()
        if self._refusals is None:
            return self._writer.publish(train_step, anchor=anchor)
        anchor = anchor or self._refusals.wanted
        handle = self._writer.publish(train_step, anchor=anchor)
        self._refusals.after(handle)
        return handle

    def close(self) -> None:
        self._writer.close()


class Publisher:
    """Feeds one stream from one trainer process. Create it with `Publisher.attach`.

    Not thread-safe: call `publish` from the thread that runs `optimizer.step()`.
    """

    def __init__(self, feed: Feed, adapter: Adapter) -> None:
        self._feed = feed
        self._adapter = adapter
        self._process = os.getpid()
        self._hooks = [o.register_step_post_hook(self._after_step) for o in adapter.optimizers]

    @classmethod
    def attach(
        cls,
        optimizer: Any,
        model: nn.Module | Sequence[nn.Module],
        config: PublisherConfig | Mapping[str, Any] | Path | str,
        *,
        masters: Masters = (),
        store: Store | None = None,
        writer: Writer | None = None,
    ) -> Self:
        """Start feeding the stream named in `config` (a path to YAML, a mapping, or a PublisherConfig).

        On an empty stream this commits version 0, an anchor, and returns when it is durable. On an existing one it
        takes the stream over with an empty version; tensors that differ from the newest version go out whole with
        the next publish. Registers a step post-hook on each optimizer. `store`: use this one instead of opening
        `config.store`.

        `masters`: for mixed precision where the optimizer steps fp32 masters that are copied to the 16-bit parameters
        afterwards: (parameter of the model, its master in the optimizer) pairs. `optimizer` is then the inner one.

        `optimizer`: one of torch's, several, or a ZeroRedundancyOptimizer; `model`: plain, DDP, or with DTensors for
        parameters (FSDP2, tensor parallelism). Or what Megatron-Core's get_megatron_optimizer returned, and the model
        chunks that it was given. Or the optimizer and the engine that deepspeed.initialize returned. What was
        recognised is logged; `deltasync.explain` shows it without publishing.

        With `spool` in the config all of it happens in the process `deltasync publisher run`, which
        the optimizer state is shared with; the trainer waits for it up to `capture_timeout` seconds at a time.

        `writer`: this process is one of several that feed the stream together, each what its optimizer steps. All of
        them attach and publish at the same steps; attach returns when all have come, and each gets the same commits.
        Where the model is spread over ranks, the ranks of torch.distributed are the writers without being asked.

        Raises ConfigError, OptimizerRefused, MappingMismatch, Fenced, StoreError, CommitUnknown; with a spool also
        SidecarUnavailable, LocalDiskError; with several writers also WriterMissing, WritersDisagree, AttemptAbandoned.
        """
        given = read_given(optimizer, model, config, masters, writer)
        settings, adapter, ranks, plan = given.settings, given.adapter, given.ranks, given.plan
        ranks.together(lambda: _check_combination(given, store))
        plan.check(adapter)
        if settings.spool is not None:
            assert isinstance(model, nn.Module)  # chunks of one are not sharable
            optimizers = list(adapter.optimizers)
            return cls(SidecarFeed.connect(plan, model, optimizers, settings, settings.spool), adapter)
        writer = given.writer
        log.info("found %s", plan.describe(adapter.kind, writer))
        if writer is None and not whole(plan.catalog, plan.pieces):
            writer = Writer(0, 1, secrets.token_hex(16))  # one process, but tensors in pieces

        def begin() -> tuple[Watched, Store, StreamWriter | Member]:
            watched, opened = Watched(adapter, plan), store or open_store(settings.store)
            return watched, opened, _writing_end(opened, settings, watched, writer)

        watched, store, end = ranks.together(begin)
        # Merged weights are in no file unless nothing has been learned yet; their base has been compared instead.
        compared = settings.lora == "merged" and not settings.refer_to_base
        end.open(None if compared else given.checkpoint)
        if writer is not None and writer.rank == 0:
            log.info("%d writers hold every element exactly once", writer.world_size)
        return cls(LocalFeed(end, watched, Refusals(store) if writer is None else None), adapter)

    @property
    def version(self) -> int:
        """The newest version known to be committed."""
        return self._feed.version

    @property
    def catalog(self) -> Catalog:
        """The canonical tensors of this stream."""
        return self._feed.catalog

    def publish(self, train_step: int | None = None, *, anchor: bool = False) -> PublishHandle:
        """Publish what has changed since the last version; call it after `optimizer.step()`, before the next.

        Waits for the previous publish, then reads the weights once; encoding, upload and commit go on in the
        background. `anchor`: also store this version whole, so that new subscribers start from it; should that fail,
        the version is committed all the same, and `Commit.anchored` says so.
        Raises what makes further publishing impossible: Fenced, PublisherStopped; CommitUnknown while the previous
        outcome is still not known (nothing is lost: call again). Everything else arrives through the handle; with a
        spool also SidecarUnavailable, SidecarBusy and CaptureLost: the next publish carries the changes.
        """
        if os.getpid() != self._process:
            raise PublisherStopped(
                f"this publisher belongs to process {self._process}, not to its forked child {os.getpid()}",
                hint="publish from the process that attached; the child has none of its threads",
            )
        return self._feed.publish(train_step, anchor=anchor)

    def check_copies(self) -> None:
        """Compare, now, what several ranks step alike, each for itself: attach does so once, and publish never.

        Those are the parameters of DDP, of hybrid sharding's replicas, and norms beside tensor-parallel matrices.
        Collective: all ranks call it between the same two steps. Reads what this rank holds once.
        Raises MappingMismatch on all of them, naming tensors and ranks. The stream is sound then, too: it has the copy
        of the rank that publishes it. Raises ConfigError where there are other ranks, but this one attached without
        them, so that nothing can be compared. For a process that is the only one there is nothing to do.
        """
        drifted = self._adapter.drifted(self.catalog)
        if drifted:
            raise MappingMismatch(
                "the ranks no longer hold the same: " + "; ".join(drifted[:30]),
                hint="something steps copies apart, such as other gradients on each rank; go on from one checkpoint",
            )

    def close(self) -> None:
        """Wait for the last publish and detach from the optimizers. Raises CommitUnknown or Fenced as `publish`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if os.getpid() == self._process:  # a forked child trains weights of its own
            self._feed.after_step(optimizer)


def _check_combination(given: Given, store: Store | None) -> None:
    """Raises ConfigError for what cannot be had together."""
    settings, adapter = given.settings, given.adapter
    if given.writer is not None and settings.refer_to_base:
        raise ConfigError(
            "a writer was given, but version 0 refers to a checkpoint only where one process feeds the stream",
            hint="leave `refer_to_base` out of publisher.yaml",
        )
    if settings.spool is None:
        return
    if given.writer is not None or not adapter.sharable:
        raise ConfigError(
            "a writer was given, the model is spread over ranks, or not all of it is published "
            f"({adapter.kind}), but with `spool` one process feeds the stream from all of it",
            hint="leave `spool` out of publisher.yaml: each writer then does its work in its own process",
        )
    if store is not None:
        raise ConfigError(
            "a store was given, but with `spool` the publisher process opens the store itself",
            hint="name it as store.url in the config of both",
        )
    if given.masters:
        raise ConfigError(
            f"{given.masters} masters were given, but with `spool` only weights stepped in place can be shared",
            hint="leave `spool` out of publisher.yaml: the publisher then runs inside the trainer",
        )


def _writing_end(
    store: Store, settings: PublisherConfig, watched: Watched, writer: Writer | None
) -> StreamWriter | Member:
    if writer is None:
        return StreamWriter(store, settings, watched.catalog, watched.shards)
    kind = Member if writer.rank else Coordinator
    return kind(store, settings, watched.catalog, watched.shards, writer)
