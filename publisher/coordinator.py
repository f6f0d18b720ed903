"""Writer 0 of several: it calls the others, waits for their parts, and commits what all of them make together."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from chunkstore.crashpoints import crash_point
from chunkstore.errors import ConfigError, DeltasyncError
from chunkstore.store import Store
from manifest.board import Board
from manifest.catalog import Catalog
from manifest.checkpoint import Checkpoint
from manifest.layout import check_layout
from manifest.parts import Call, CallKind, Part, ShardRef, layout_hash
from manifest.schema import ChunkRef, Manifest, Stats
from manifest.settle import Patience, wait_for
from publisher.adapters.ranks import Ranks
from publisher.combine import Combined, combine
from publisher.commit import Attempt, Commit, PublishHandle, stats_of
from publisher.config import PublisherConfig
from publisher.errors import AttemptAbandoned, WriterMissing
from publisher.group import Meeting, Writer, current_refs, shard_refs
from publisher.mapping import verify_against_files
from publisher.shard import Shard
from publisher.takeover import fenced
from publisher.upload import Upload
from publisher.writer import StreamWriter

log = logging.getLogger("deltasync.publisher")


class Caller:
    """Calls the other writers and collects their answers. `patience`: for one answer of all of them."""

    def __init__(self, board: Board, writers: int, patience: Patience) -> None:
        self._board = board
        self._writers = writers
        self._patience = patience
        self._number = 0

    def resume(self, version: int, base: bytes | None) -> None:
        """Count on from what an earlier coordinator of this run has called."""
        self._number = max((call.number for call in self._board.calls(version, base)), default=0)

    def call(
        self,
        kind: CallKind,
        base: Manifest | None,
        attempt: bytes | None = None,
        *,
        train_step: int | None = None,
        whole: Sequence[int] = (),
        reason: str = "",
    ) -> Call:
        """Store a call, durable on return."""
        self._number += 1
        call = Call(
            stream=self._board.stream.id,
            version=0 if base is None else base.version + 1,
            attempt=attempt or secrets.token_bytes(16),
            number=self._number,
            kind=kind,
            base=None if base is None else base.hash,
            train_step=train_step,
            layout=self._board.layout,
            whole=sorted(whole),
            reason=reason[:2000],
        )
        crash_point("coordinator.before_call")
        self._board.call(call)
        crash_point("coordinator.after_call")
        return call

    def gather(self, call: Call, check: Callable[[], None] = lambda: None) -> list[Part]:
        """The others' parts, in order. Raises WriterMissing naming those that are not there in time.

        `check`: raises what makes further waiting pointless.
        """
        others = set(range(1, self._writers))

        def complete() -> bool | None:
            check()
            return others <= self._board.answered(call.version, call.attempt) or None

        if others and wait_for(complete, self._patience) is None:
            missing = sorted(others - self._board.answered(call.version, call.attempt))
            raise WriterMissing(
                f"version {call.version}: no part of writers {', '.join(map(str, missing[:20]))} of {self._writers} "
                f"within {self._patience.deadline:g} s",
                hint="see their logs; nothing is lost, the next publish carries the changes",
            )
        return [self._board.part(call.version, call.attempt, writer) for writer in sorted(others)]


def own_part(call: Call, shards: list[ShardRef], chunks: list[ChunkRef], stats: Stats) -> Part:
    """The coordinator's part, which is never stored."""
    return Part(
        stream=call.stream,
        version=call.version,
        attempt=call.attempt,
        writer=0,
        base=call.base,
        train_step=call.train_step,
        layout=call.layout,
        shards=shards,
        chunks=chunks,
        stats=stats,
    )


@dataclass
class SharedAttempt(Attempt):
    """One try at one version together with the other writers.

    `stale`: tensors that some writer believes to be something else in the base; filled in when they are found.
    """

    caller: Caller = field(kw_only=True)
    verify: Callable[[Combined], None] = field(kw_only=True)
    called: "Future[Call]" = field(default_factory=Future)
    stale: list[int] = field(default_factory=list)
    started: bool = False

    def start(self, thread: ThreadPoolExecutor, changes: Upload, anchor: Upload | None) -> None:
        """See `Attempt.start`."""
        self.started = True
        super().start(thread, changes, anchor)

    def announce(self) -> Call:
        """Call the others, before one's own part is even begun."""
        return self.caller.call("version", self.base, self.attempt, train_step=self.train_step)

    def abandon(self, error: BaseException) -> None:
        """Tell the others that nothing will come of it. Not telling them costs only time."""
        try:
            self.caller.call(
                "abandoned", self.base, whole=self.stale, reason=f"{type(error).__name__}: {error}"
            )
        except DeltasyncError as failure:
            log.warning("the writers were not told that version %d is abandoned: %s", self.version, failure)

    def _run(self, changes: Upload, anchor: Upload | None) -> Commit | None:
        try:
            self.seconds = dict(self.taken.seconds)
            call = self.called.result()
            uploaded = changes.finish()
            own = own_part(
                call, shard_refs(self.taken.sealed), uploaded.chunks, stats_of(self.taken, uploaded)
            )
            parts = [own, *self.caller.gather(call, self._check_free)]
            crash_point("coordinator.after_parts")
            together = self._together(call, parts)
            if not together.chunks and self.base is not None:
                self.caller.call("unchanged", self.base)
                return None
            manifest = self._version(together.digests, together.chunks, together.stats)
            check_layout(manifest, self.catalog)
            self.manifest = self.log.signed(manifest)
            crash_point("publisher.before_manifest")
        except BaseException as error:  # nothing has been offered: nobody can have committed it
            self.abandon(error)
            raise
        return self.settle()

    def _check_free(self) -> None:
        """Raises Fenced once another has the version: the other writers see that too, and need not answer."""
        winner = self.log.read(self.version)
        if winner is not None:
            raise fenced(self.log, self, winner)

    def _together(self, call: Call, parts: Sequence[Part]) -> Combined:
        committed = None if self.base is None else self.base.digest_array
        together = combine(call, self.catalog, parts, committed)
        if together.stale:
            self.stale = together.stale
            names = ", ".join(self.catalog.tensors[t].name for t in self.stale[:10])
            raise AttemptAbandoned(
                f"version {self.version}: the writers build on something else than the version before in "
                f"{len(self.stale)} tensors: {names}",
                hint="nothing is lost: the next publish sends them whole",
            )
        self.verify(together)
        return together


class Coordinator(StreamWriter):
    """A StreamWriter that commits what all writers make together, its own shards among it."""

    def __init__(
        self, store: Store, config: PublisherConfig, catalog: Catalog, shards: Sequence[Shard], writer: Writer
    ) -> None:
        super().__init__(store, config, catalog, shards)
        self._writer = writer
        self._ranks = Ranks(writer)
        self._checkpoint: Checkpoint | None = None

    def publish(self, train_step: int | None, *, anchor: bool) -> PublishHandle:
        """See `Publisher.publish`."""
        check_shared_publish(train_step, anchor=anchor)
        return super().publish(train_step, anchor=anchor)

    def _begin(self, checkpoint: Checkpoint | None) -> Manifest | None:
        """See `StreamWriter._begin`. Returns when the other ranks have found the stream too."""
        own = super()._begin

        def begin() -> Manifest | None:
            base = own(checkpoint)
            layout = layout_hash(self.catalog.hash, self._writer.world_size, self._writer.run)
            patience = Patience(deadline=self._config.commit_deadline)
            board = Board(self._store, self._log.stream, layout, patience, self._signer)
            self._caller = Caller(
                board, self._writer.world_size, group_patience(self._config.writers_timeout)
            )
            self._caller.resume(0, None)
            return base

        base = self._ranks.together(begin)
        self._ranks.told(Meeting.at(self._store.url, self._log.stream, self._signer))
        self._ranks.together(lambda: None)
        return base

    def _verify_start(self, checkpoint: Checkpoint | None) -> None:
        self._checkpoint = checkpoint  # compared with what all writers hold, before version 0 is committed

    def _compare(self, base: Manifest, *, everything: bool) -> list[int]:
        """Ask every writer what it holds; ids of the tensors that are not what `base` holds, all taken together."""
        call = self._caller.call("join", base)
        try:
            own = own_part(call, current_refs(self.shards), [], Stats())
            together = combine(call, self.catalog, [own, *self._caller.gather(call)], base.digest_array)
            whole = list(range(len(self.catalog.tensors))) if everything else together.stale
            self._caller.call("joined", base, whole=whole)
        except DeltasyncError as error:
            self._caller.call("abandoned", base, reason=str(error))
            raise
        return whole

    def _new_attempt(self, train_step: int | None) -> SharedAttempt:
        attempt = SharedAttempt(
            self._log,
            self.catalog,
            self._base,
            self._epoch,
            self._id,
            train_step,
            caller=self._caller,
            verify=self._verify if self._base is None else lambda _: None,
        )
        attempt.called = self._commits.submit(attempt.announce)
        return attempt

    def _verify(self, together: Combined) -> None:
        if self._checkpoint is not None:
            verify_against_files(together.digests.tolist(), self.catalog, self._checkpoint)

    def _send(self, attempt: Attempt, anchor: bool) -> None:
        assert isinstance(attempt, SharedAttempt)
        try:
            super()._send(attempt, anchor)
        finally:
            if not attempt.started:
                self._commits.submit(
                    attempt.abandon, AttemptAbandoned("the coordinator could not read its weights")
                )

    def _committed(self, shard: Shard) -> int | None:
        """Of a range nobody knows it: that all ranges add up is checked when the parts are there."""
        return None if self._base is None else shard.base_digest

    def _drop(self, attempt: Attempt, *, put_back: bool = False) -> None:
        super()._drop(attempt, put_back=put_back)
        if put_back and isinstance(attempt, SharedAttempt):
            self._tracking.send_whole(attempt.stale)


def group_patience(deadline: float, sleep: Callable[[float], object] = time.sleep) -> Patience:
    """How long one writer waits for others, and how often it looks."""
    return Patience(deadline, first_delay=0.02, longest_delay=1.0, sleep=sleep)


def check_shared_publish(train_step: int | None, *, anchor: bool) -> None:
    """Raises ConfigError for what several writers cannot do."""
    if train_step is None:
        raise ConfigError(
            "publish() needs train_step where several writers feed a stream",
            hint="it is how they know that they publish the same weights: the same number in all of them",
        )
    if anchor:
        raise ConfigError(
            "publish(anchor=True) needs a single writer",
            hint="`deltasync publisher run` without a spool keeps such a stream's anchors",
        )
