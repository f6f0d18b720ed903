"""Claim a stream for this publisher incarnation (DESIGN §7, "Fencing")."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from chunkstore.crashpoints import crash_point
from chunkstore.errors import Action, DeltasyncError
from manifest.catalog import Catalog, root_digest
from manifest.errors import Fenced
from manifest.history import find_plan
from manifest.log import VersionLog
from manifest.schema import Manifest, Stats
from publisher.errors import MappingMismatch


def claim(log: VersionLog, catalog: Catalog, newest: Manifest, publisher: bytes, *, insist: bool) -> Manifest:
    """Commit an empty version with epoch = highest + 1 and return it: from then on a predecessor is fenced.

    A predecessor's write that lands first is simply the new base. Raises Fenced if another publisher claims an equal
    or higher epoch meanwhile, unless `insist`; MappingMismatch if the stream holds another model.
    """
    while True:
        check_catalog(log, catalog, newest)
        epoch = newest.epoch + 1
        offered = log.signed(empty_version(newest, epoch, publisher))
        crash_point("publisher.before_claim")
        outcome = log.commit(offered)
        crash_point("publisher.after_claim")
        if outcome.won:
            return offered
        if outcome.winner.epoch >= epoch and not insist:
            raise fenced(log, offered, outcome.winner)
        newest = log.newest(after=newest.version) or outcome.winner


def check_catalog(log: VersionLog, catalog: Catalog, newest: Manifest) -> None:
    """Raises MappingMismatch unless the stream's tensors are this model's."""
    if newest.catalog != catalog.hash:
        raise MappingMismatch(
            f"the stream at {log.store.url} holds another model: its version {newest.version} has catalog "
            f"{newest.catalog.hex()[:16]}…, this model has {catalog.hash.hex()[:16]}…",
            hint="give this model a stream of its own: another URL in store.url",
        )


def empty_version(
    base: Manifest, epoch: int, publisher: bytes, now: Callable[[], float] = time.time
) -> Manifest:
    """The next version with the same weights."""
    return Manifest(
        stream=base.stream,
        version=base.version + 1,
        kind="delta",
        base_version=base.version,
        base_root=base.root,
        root=base.root,
        parent_hash=base.hash,
        epoch=epoch,
        publisher=publisher,
        commit_id=secrets.token_bytes(16),
        attempt=secrets.token_bytes(16),
        catalog=base.catalog,
        train_step=base.train_step,
        optimizer_steps=0,
        created_at=now(),
        digests=base.digests,
        chunks=[],
        stats=Stats(elements=base.stats.elements),
    )


def reference_version(
    stream: bytes,
    catalog: Catalog,
    digests: Sequence[int],
    publisher: bytes,
    now: Callable[[], float] = time.time,
) -> Manifest:
    """Version 0 as the checkpoint that both sides have, whose tensors have these `digests`."""
    held = np.array(digests, np.uint64)
    return Manifest(
        stream=stream,
        version=0,
        kind="reference",
        base_version=None,
        base_root=None,
        root=root_digest(catalog, held),
        parent_hash=None,
        epoch=1,
        publisher=publisher,
        commit_id=secrets.token_bytes(16),
        attempt=secrets.token_bytes(16),
        catalog=catalog.hash,
        train_step=None,
        optimizer_steps=0,
        created_at=now(),
        digests=held.astype("<u8").tobytes(),
        chunks=[],
        stats=Stats(elements=sum(t.numel for t in catalog.tensors)),
    )


def reachable(log: VersionLog, version: int) -> bool:
    """Whether a subscriber that trusts whom `log` trusts, with nothing but the base checkpoint, gets to `version`."""
    try:
        find_plan(log, None, version, references=True)
    except DeltasyncError as error:
        if error.action is Action.RETRY:
            raise
        return False
    return True


class Claimant(Protocol):
    """Who wanted a version: a manifest, or an attempt at one."""

    @property
    def version(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def publisher(self) -> bytes: ...


def fenced(log: VersionLog, mine: Claimant, winner: Manifest) -> Fenced:
    """The error for a publisher that finds another's manifest at its own next version."""
    return Fenced(
        f"publisher {mine.publisher.hex()} (epoch {mine.epoch}) lost version {mine.version} of {log.store.url} "
        f"to publisher {winner.publisher.hex()} (epoch {winner.epoch})",
        hint="only one publisher may feed a stream: stop the other one, or give this one its own stream; "
        "`takeover: true` claims the stream again at the next start. Ranks of one trainer attach on rank 0 only, or "
        "all with writer=deltasync.Writer.of_process_group()",
    )
