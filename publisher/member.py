"""Writers 1 … N−1 of several: each answers the coordinator's calls, and learns from the log what became of its part."""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from chunkstore.crashpoints import crash_point
from chunkstore.errors import DeltasyncError, ObjectMissing, StoreError
from chunkstore.store import Store
from manifest.board import Board
from manifest.catalog import Catalog
from manifest.checkpoint import Checkpoint
from manifest.errors import CommitUnknown, Untrusted
from manifest.key_files import load_signer
from manifest.keys import chunk_key
from manifest.log import StreamInfo, VersionLog, open_stream
from manifest.parts import Call, Part, ShardRef, layout_hash
from manifest.schema import ChunkRef, Manifest, Stats
from manifest.settle import Patience, wait_for
from manifest.signing import Signer
from publisher.adapters.ranks import Ranks
from publisher.capture import Copies
from publisher.commit import Commit, PublishHandle, newest_of, stats_of
from publisher.config import PublisherConfig
from publisher.coordinator import check_shared_publish, group_patience
from publisher.errors import AttemptAbandoned, CaptureLost, PublisherStopped, WriterMissing, WriterReplaced
from publisher.group import Meeting, Writer, current_refs, shard_refs
from publisher.optimizers import StepRecord
from publisher.pending import Outcome, Pending
from publisher.shard import Shard
from publisher.tracking import Tracking
from publisher.upload import Upload

log = logging.getLogger("deltasync.publisher")

_STALE: Final = 60.0
"""Seconds for which a network mount may not show what has just been written elsewhere."""

_NOT_ALIKE: Final = "writer 0 needs the same run, number of writers, model and step; see its log"


class Member:
    """The writing end of one stream for one of its writers other than the first. Used as StreamWriter is."""

    def __init__(
        self, store: Store, config: PublisherConfig, catalog: Catalog, shards: Sequence[Shard], writer: Writer
    ) -> None:
        self.catalog = catalog
        self.shards = shards
        self._store = store
        self._config = config
        self._writer = writer
        self._ranks = Ranks(writer)
        self._tracking = Tracking(catalog, shards, lambda: None)
        self._base: Manifest | None = None
        self._pending: Pending | None = None
        self._seen = 0  # number of the newest call for the next version that was acted upon
        self._stopped: DeltasyncError | None = None
        self._closing = threading.Event()
        # The coordinator waits for others first, and may then take its time to commit or to give up.
        deadline = config.writers_timeout + config.commit_deadline
        self._patience = group_patience(deadline, self._closing.wait)
        self._uploads = ThreadPoolExecutor(config.upload_threads, thread_name_prefix="deltasync-upload")
        self._waits = ThreadPoolExecutor(3, thread_name_prefix="deltasync-part")

    @property
    def version(self) -> int:
        """The newest version known to be committed."""
        assert self._base is not None
        return newest_of(self._base.version, None if self._pending is None else self._pending.future)

    def open(self, checkpoint: Checkpoint | None) -> None:
        """Join the coordinator of this run: with version 0 on an empty stream, else by telling it what is held here.

        Raises WriterMissing if there is none in time, AttemptAbandoned if it gave up, ConfigError if it is not to be
        met here; then the writer is closed.
        """
        try:
            signer = self._ranks.together(self._prepare)
            meeting: Meeting | None = self._ranks.told(None)[0]
            stream = self._ranks.together(lambda: self._find_stream(meeting, signer))
            patience = Patience(deadline=self._config.commit_deadline)
            self._log = VersionLog(self._store, stream, patience)
            layout = layout_hash(self.catalog.hash, self._writer.world_size, self._writer.run)
            self._board = Board(self._store, stream, layout, patience, signer)
            self._join()
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

    def publish(self, train_step: int | None, *, anchor: bool) -> PublishHandle:
        """See `Publisher.publish`."""
        check_shared_publish(train_step, anchor=anchor)
        if self._stopped is not None:
            raise PublisherStopped(f"this publisher has stopped: {self._stopped}") from self._stopped
        self._settle_previous()
        return PublishHandle(self._send(Pending(self._base, train_step)).future)

    def close(self) -> None:
        """Wait for the last publish. Raises CommitUnknown as `publish` does."""
        try:
            if self._stopped is None:
                self._settle_previous()
        finally:
            self._shut_down()
            self._stopped = self._stopped or PublisherStopped("the publisher was closed")

    def _join(self) -> None:
        found = wait_for(self._look_for_start, self._patience)
        if found is None:
            raise self._no_call("nobody has called")
        self._base, call = found
        if self._base is None:
            self._first_version(call)
        elif call is not None:
            self._seen = call.number  # a call for a version is answered by whoever was there
            self._take_note(self._answer_first(call) if call.kind == "join" else call)
        log.info("writer %d joined at version %d", self._writer.rank, self.version)

    def _answer_first(self, call: Call) -> Call:
        """Tell the coordinator, which has called for that, what is held here; returns the call that ends it."""
        self._answer(self._part(call, current_refs(self.shards), [], Stats()))
        later = wait_for(lambda: self._calls(call.version, self._base, call.number) or None, self._patience)
        if later is None or later[0].kind == "abandoned":
            raise self._no_call(
                "the writers did not come together: " + (later[0].reason if later else "no word")
            )
        return later[0]

    def _prepare(self) -> Signer | None:
        self._tracking.prepare()
        return load_signer(self._config.signing)

    def _find_stream(self, meeting: Meeting | None, signer: Signer | None) -> StreamInfo:
        """`meeting`: what the coordinator says, where it can. Raises ConfigError if it is not to be met here."""
        if meeting is None:
            stream = wait_for(self._look_for_stream, self._patience)
        else:
            deadline = min(_STALE, self._config.writers_timeout) if meeting.url == self._store.url else 0.0
            stream = wait_for(self._look_for_stream, group_patience(deadline))
            meeting.check(Meeting.at(self._store.url, stream, signer))
        if stream is None:
            raise self._no_call("there is no stream yet")
        return stream

    def _look_for_stream(self) -> StreamInfo | None:
        try:
            return open_stream(self._store)
        except ObjectMissing:
            return None

    def _look_for_start(self) -> tuple[Manifest | None, Call | None] | None:
        """The newest version and call, once this run's coordinator has the stream."""
        newest = self._log.newest()
        version, base = (0, None) if newest is None else (newest.version + 1, newest.hash)
        call = next(reversed(self._board.calls(version, base)), None)
        if call is None and (newest is None or not self._is_ours(newest)):
            return None
        return newest, call

    def _is_ours(self, manifest: Manifest) -> bool:
        """Whether this run's coordinator has called for it."""
        try:
            return self._board.find_call(manifest.version, manifest.attempt) is not None
        except Untrusted:
            return False

    def _first_version(self, call: Call | None) -> None:
        if call is not None and call.over:
            raise AttemptAbandoned(f"the coordinator gave up version 0: {call.reason}")
        pending = self._send(Pending(None, None))
        try:
            pending.future.result()
        finally:
            self._drop(pending)

    def _send(self, pending: Pending) -> Pending:
        """Seal and start the attempt. However it is interrupted, it can be settled afterwards."""
        self._pending = pending
        begin = time.perf_counter()
        try:
            pending.called = self._waits.submit(self._wait_for_call, pending)
            upload = Upload(
                self._store,
                lambda n: chunk_key(
                    pending.version, pending.called.result().attempt, self._writer.rank, pending.first + n
                ),
                self._uploads,
                self._config.upload_memory_mb << 20,
            )
            self._tracking.take(pending.taken, upload, self._committed)
            self._tracking.finish(pending.taken, begin)
            pending.sealed = True
            pending.future = self._waits.submit(self._run, pending, upload)
        except BaseException as error:
            pending.over = True
            if not pending.future.done():
                pending.future.set_exception(error)
            if isinstance(error, CaptureLost):
                self._tracking.lose_track()
            if not isinstance(error, DeltasyncError):
                raise
        return pending

    def _committed(self, shard: Shard) -> int | None:
        return None if self._base is None else shard.base_digest

    def _wait_for_call(self, pending: Pending) -> Call:
        """The call that this attempt answers. Raises WriterMissing, AttemptAbandoned."""
        last, hint = "nobody has called", _NOT_ALIKE

        def look() -> Call | None:
            nonlocal last, hint
            self._check_wanted(pending)
            calls = self._calls(pending.version, pending.base, self._seen)
            ended = next((call for call in calls if call.whole), None)
            if ended is not None:  # what is sealed is not all that is wanted
                pending.outcome = Outcome(False, ended=ended)
                raise AttemptAbandoned(f"version {pending.version} needs more of this writer: {ended.reason}")
            if calls:
                newest = calls[-1]
                steps = [str(call.train_step) for call in calls if call.kind == "version"]
                last, hint = f"it has called for train steps {', '.join(steps) or 'none'}", _NOT_ALIKE
                if newest.kind == "abandoned" and str(pending.train_step) in steps:
                    last += f", and given up: {newest.reason}"
                    hint = "nothing is lost: all writers need to publish at about the same time; see writer 0's log"
                if newest.kind == "version" and newest.train_step == pending.train_step:
                    return newest
                if newest.kind == "join" and pending.sealed:
                    self._answer_join(pending, newest)
            if self._log.exists(pending.version):
                raise AttemptAbandoned(f"version {pending.version} was committed without this writer")
            return None

        call = wait_for(look, self._patience)
        if call is None:
            raise self._no_call(f"{last}; this writer has train step {pending.train_step}", hint)
        return call

    def _answer_join(self, pending: Pending, call: Call) -> None:
        """The coordinator has come back. What is sealed already is the base that this writer believes in."""
        self._answer(self._part(call, shard_refs(pending.taken.sealed), [], Stats()))
        self._seen = call.number

    def _run(self, pending: Pending, upload: Upload) -> Commit | None:
        uploaded = upload.finish()
        call = pending.called.result()
        self._seen = call.number
        stats = stats_of(pending.taken, uploaded)
        part = self._part(call, shard_refs(pending.taken.sealed), uploaded.chunks, stats)
        pending.answered = True
        if not self._answer(part):
            raise WriterReplaced(
                f"another process has answered as writer {self._writer.rank} of run {self._writer.run}",
                hint="two processes have one rank, or a run's name was used again: start all of them anew",
            )
        return self._learn(pending)

    def _answer(self, part: Part) -> bool:
        """See `Board.answer`."""
        crash_point("writer.before_part")
        mine = self._board.answer(part)
        crash_point("writer.after_part")
        return mine

    def _learn(self, pending: Pending) -> Commit | None:
        """What became of the attempt that was answered. Raises AttemptAbandoned, CommitUnknown."""
        problem: StoreError | None = None

        def look() -> Outcome | None:
            nonlocal problem
            try:
                return self._look_for_outcome(pending)
            except StoreError as error:  # says nothing about the attempt
                problem = error
                return None

        outcome = wait_for(look, self._patience)
        if outcome is None:
            raise CommitUnknown(
                f"writer {self._writer.rank} cannot tell whether version {pending.version} will be committed"
                + (f": {problem}" if problem else ""),
                hint="nothing is lost; if the coordinator has died, restart the trainer",
            ) from problem
        pending.outcome = outcome
        if outcome.won:
            assert outcome.manifest is not None
            return Commit(outcome.manifest.version, outcome.manifest, dict(outcome.manifest.stats.seconds))
        if outcome.ended is not None and outcome.ended.kind == "unchanged":
            return None
        why = (
            "its version is another's"
            if outcome.ended is None
            else outcome.ended.reason or outcome.ended.kind
        )
        raise AttemptAbandoned(
            f"version {pending.version} was not committed: {why}",
            hint="nothing is lost, the next publish carries the changes",
        )

    def _look_for_outcome(self, pending: Pending) -> Outcome | None:
        self._check_wanted(pending)
        call = pending.called.result()
        manifest = self._log.read(pending.version)
        if manifest is not None:
            return Outcome(manifest.attempt == call.attempt, manifest)
        later = self._calls(pending.version, pending.base, call.number)
        return Outcome(False, ended=later[0]) if later else None

    def _calls(self, version: int, base: Manifest | None, after: int) -> list[Call]:
        """Calls for `version` with numbers above `after`, oldest first."""
        calls = self._board.calls(version, None if base is None else base.hash)
        return [call for call in calls if call.number > after]

    def _check_wanted(self, pending: Pending) -> None:
        if pending.over or self._closing.is_set():
            raise PublisherStopped(f"nobody waits for version {pending.version} any more")

    def _settle_previous(self) -> None:
        """Learn the previous attempt's outcome: drop its changes, or put them back."""
        pending = self._pending
        if pending is None:
            return
        error = pending.future.exception()
        if isinstance(error, WriterReplaced):
            self._stopped = error
            raise error
        if pending.answered and pending.outcome is None:
            try:
                self._learn(pending)
            except AttemptAbandoned as abandoned:
                error = abandoned
        if error is not None:
            log.warning("publishing version %d: %s", pending.version, error)
        self._drop(pending)

    def _drop(self, pending: Pending) -> None:
        """Forget a decided attempt, or one that nobody can commit since its part was never stored."""
        pending.over = True
        self._pending = None
        outcome = pending.outcome
        unchanged = outcome is not None and outcome.ended is not None and outcome.ended.kind == "unchanged"
        if not unchanged and (outcome is None or not outcome.won):
            self._tracking.put_back(pending.taken)
        if outcome is not None and outcome.ended is not None:
            self._take_note(outcome.ended)
        newest = outcome.manifest if outcome is not None else None
        if pending.base is not None and (outcome is None or not outcome.won):
            newest = self._log.newest(after=pending.version - 1)
        if newest is not None:
            self._base, self._seen = newest, 0  # calls are numbered within a version

    def _take_note(self, call: Call) -> None:
        if call.over:
            self._seen = max(self._seen, call.number)
            self._tracking.send_whole(call.whole)

    def _part(self, call: Call, shards: list[ShardRef], chunks: list[ChunkRef], stats: Stats) -> Part:
        return Part(
            stream=call.stream,
            version=call.version,
            attempt=call.attempt,
            writer=self._writer.rank,
            base=call.base,
            train_step=call.train_step,
            layout=self._board.layout,
            shards=shards,
            chunks=chunks,
            stats=stats,
        )

    def _no_call(self, why: str, hint: str = _NOT_ALIKE) -> WriterMissing:
        writer = self._writer
        return WriterMissing(
            f"writer {writer.rank} of {writer.world_size} (run {writer.run}) waited {self._patience.deadline:g} s "
            f"for the coordinator at {self._store.url}: {why}",
            hint=hint,
        )

    def _shut_down(self) -> None:
        self._closing.set()
        self._tracking.close()
        self._uploads.shutdown(wait=True, cancel_futures=True)
        self._waits.shutdown(wait=True, cancel_futures=True)
