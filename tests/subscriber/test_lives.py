"""An engine in another process: not there yet, gone for a while, restarted, written by somebody else."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkstore.errors import DeltasyncError
from chunkstore.posix import PosixStore
from manifest.catalog import Catalog
from manifest.schema import ChunkRef
from subscriber.daemon import AppliedVersion, Subscriber
from subscriber.engine import Prepared, Scattered
from subscriber.errors import (
    EngineBusy,
    EngineChanged,
    EngineFailed,
    EngineMismatch,
    EngineRestarted,
    StagedLost,
)
from subscriber.poll import Poller, sleep_until
from subscriber.report import Report
from subscriber.spool import Share, Spool
from subscriber.staging import StagedUpdate
from tests.subscriber.parts import (
    TIMEOUT,
    RemoteEngine,
    differing,
    make_config,
    running,
    small_weights,
    until,
)
from tests.support.streams import StreamBuilder


class Remote:
    """A stream of two versions, such an engine, a subscriber, and what it said it serves."""

    def __init__(self, tmp_path: Path) -> None:
        self.builder = StreamBuilder(PosixStore(tmp_path / "store"), small_weights())
        self.builder.train()
        self.engine = RemoteEngine(self.builder)
        self.applied: list[AppliedVersion] = []
        self.subscriber = Subscriber(make_config(tmp_path, self.builder), self.engine, self.applied.append)

    def holds(self, version: int) -> bool:
        return self.subscriber.version == version and not differing(
            self.engine.module, self.builder.weights[version]
        )

    def reason(self) -> str:
        return self.subscriber.report.reason or ""


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path)


def test_it_waits_for_an_engine_that_is_not_there_yet(remote: Remote) -> None:
    remote.engine.gone = EngineFailed("connection refused", hint="start it")
    with running(remote.subscriber):
        until(lambda: remote.subscriber.report.status().last_error is not None)
        assert remote.subscriber.report.reason is not None
        remote.engine.gone = None
        until(lambda: remote.holds(1))
        until(lambda: remote.subscriber.report.status().last_error is None)


def test_an_engine_that_serves_something_else_is_held_before_anything_is_fetched(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server does that was started from a checkpoint of its own."""
    original, reasons = Spool.fetch, []

    def watched(self: Spool, ref: ChunkRef, catalog: Catalog, version: int, share: Share) -> int:
        reasons.append(remote.engine._gate.reason)
        return original(self, ref, catalog, version, share)

    monkeypatch.setattr(Spool, "fetch", watched)
    asyncio.run(remote.engine.release(7))
    with running(remote.subscriber):
        until(lambda: remote.holds(1))
    assert set(reasons) == {"it holds no version of this stream"}


def test_a_new_life_is_brought_to_the_newest_version(remote: Remote) -> None:
    with running(remote.subscriber):
        until(lambda: remote.holds(1))
        remote.engine.restart()
        until(lambda: len(remote.applied) == 2 and remote.holds(1))
        assert remote.subscriber.report.status().boot_id == "life-2"


def test_a_life_that_ends_during_an_apply(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Scattered] = RemoteEngine._scatter

    def dies(self: RemoteEngine, prepared: Prepared) -> Scattered:
        if self.life == 1 and prepared.staged.target.version:
            self.restart()
            raise EngineRestarted("died while it was written", hint="")
        return original(self, prepared)

    monkeypatch.setattr(RemoteEngine, "_scatter", dies)
    with running(remote.subscriber):
        until(lambda: remote.holds(1) and remote.engine.life == 2)


def test_an_engine_that_could_not_be_written_just_now_serves_on(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that cannot be paused in time, or whose staged files were lost: nothing was written, nothing is held."""
    reasons: list[str] = []
    with running(remote.subscriber):
        until(lambda: remote.holds(1))
        monkeypatch.setattr(Report, "held", lambda report, reason: reasons.append(reason))
        held = len(remote.engine.held)
        remote.engine.busy = EngineBusy("requests are running", hint="")
        remote.builder.train()
        until(lambda: remote.holds(2))
        assert remote.engine.busy is None
        assert (reasons, len(remote.engine.held)) == ([], held)
        assert [applied.from_anchor for applied in remote.applied] == [True, False]


def test_an_engine_that_somebody_has_paused_is_not_ready(remote: Remote) -> None:
    """Requests would wait there; its weights are right all the while, and updates go on."""
    report = remote.subscriber.report
    with running(remote.subscriber):
        until(lambda: remote.holds(1) and report.ready)
        held = len(remote.engine.held)
        remote.engine.paused = "somebody has paused it"
        until(lambda: not report.ready)
        assert (remote.reason(), report.status().state) == ("somebody has paused it", "held")
        assert "deltasync_subscriber_ready 0.0" in report.metrics.text().decode()
        remote.builder.train()
        until(lambda: remote.holds(2))
        remote.engine.paused = None
        until(lambda: report.ready)
        assert (report.reason, report.status().state) == (None, "serving")
        assert len(remote.engine.held) == held


def test_what_serves_nothing_is_looked_at_every_few_seconds(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIELD_REPORTS knows fleets that stay paused for a minute after what they waited for was there again."""
    waits: list[float] = []

    async def counted(wake: asyncio.Event, seconds: float) -> None:
        waits.append(seconds)
        await sleep_until(wake, 0)

    monkeypatch.setattr("subscriber.session.sleep_until", counted)
    with running(remote.subscriber):
        until(lambda: remote.holds(1))
        remote.engine.gone = EngineFailed("its memory has been released", hint="")
        until(lambda: not remote.subscriber.report.ready)
        waits.clear()
        until(lambda: len(waits) > 30)
        remote.engine.gone = None
        until(lambda: remote.holds(1))
    assert max(waits) <= 2


@pytest.mark.parametrize(
    "error",
    [
        EngineFailed("it is gone", hint="look at its log"),
        EngineMismatch("it is gone, and something else answers", hint="start the right one"),
    ],
)
def test_an_engine_that_is_gone_for_a_while_keeps_its_version(remote: Remote, error: DeltasyncError) -> None:
    with running(remote.subscriber):
        until(lambda: remote.holds(1))
        remote.engine.gone = error
        until(lambda: "it is gone" in remote.reason() and remote.subscriber.version is None)
        remote.engine.gone = None
        until(lambda: remote.subscriber.report.ready and remote.holds(1))
    assert len(remote.applied) == 1


@pytest.mark.parametrize("harm", [True, False])
def test_somebody_elses_write_is_noticed_without_a_new_version(remote: Remote, harm: bool) -> None:
    with running(remote.subscriber):
        until(lambda: remote.holds(1))
        if harm:
            with torch.no_grad():
                remote.engine.module.get_parameter("embed.weight").add_(1)
        remote.engine.written = EngineChanged("somebody wrote", hint="")
        until(lambda: "somebody wrote" in remote.engine.held)
        until(lambda: remote.subscriber.report.ready and remote.holds(1))
    assert len(remote.applied) == (2 if harm else 1)


@pytest.mark.parametrize("restarts", [True, False])
def test_an_engine_is_watched_while_its_next_version_is_fetched(
    restarts: bool, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIELD_REPORTS: miles#1724: a recovered engine got traffic before it was synced."""
    original, fetching, go = Spool.fetch, threading.Event(), threading.Event()

    def slow(self: Spool, ref: ChunkRef, catalog: Catalog, version: int, share: Share) -> int:
        if version == 2:
            fetching.set()
            assert go.wait(TIMEOUT)
        return original(self, ref, catalog, version, share)

    monkeypatch.setattr(Spool, "fetch", slow)
    with running(remote.subscriber):
        until(lambda: remote.holds(1))
        remote.builder.train()
        until(fetching.is_set)
        assert remote.subscriber.report.ready
        if restarts:
            remote.engine.restart()
            until(lambda: not remote.subscriber.report.ready)
        else:  # it is found whole again, perhaps before anybody looks: what it was told stays
            remote.engine.written = EngineChanged("somebody wrote", hint="")
            until(lambda: "somebody wrote" in remote.engine.held)
        go.set()
        until(lambda: remote.holds(2) and remote.subscriber.report.ready)


@pytest.mark.parametrize("kind", [EngineChanged, StagedLost])
def test_what_happens_to_an_engine_refuses_no_version(
    kind: type[DeltasyncError], remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher would answer with an anchor, which costs the trainer time and helps nobody."""
    tries: list[StagedUpdate] = []
    refused: list[int] = []
    prepare, failed = RemoteEngine.prepare, Report.failed

    async def fails(self: RemoteEngine, staged: StagedUpdate) -> Prepared:
        tries.append(staged)
        if len(tries) < 4:
            raise kind("not the version's fault", hint="")
        return await prepare(self, staged)

    def watched(self: Report, *args: Any, **kwargs: Any) -> None:
        failed(self, *args, **kwargs)
        refused.extend(refusal.version for refusal in self.status().refused)

    with running(remote.subscriber):
        until(lambda: remote.holds(1))
        monkeypatch.setattr(RemoteEngine, "prepare", fails)
        monkeypatch.setattr(Report, "failed", watched)
        remote.builder.train()
        until(lambda: remote.holds(2))
    assert len(tries) >= 4
    assert refused == []


def test_what_keeps_failing_is_tried_less_and_less_often_and_a_newer_version_at_once(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    looks: list[int] = []
    prepare, newest = RemoteEngine.prepare, Poller.newest

    async def fails(self: RemoteEngine, staged: StagedUpdate) -> Prepared:
        tries.append(staged.target.version)
        if staged.target.version == 2:
            raise EngineFailed("not now", hint="")
        return await prepare(self, staged)

    def counted(self: Poller, after: int) -> int | None:
        looks.append(after)
        return newest(self, after)

    with running(remote.subscriber):
        until(lambda: remote.holds(1))
        monkeypatch.setattr(RemoteEngine, "prepare", fails)
        monkeypatch.setattr(Poller, "newest", counted)
        remote.builder.train()
        until(lambda: len(looks) >= 60)
        assert 2 <= len(tries) <= 20
        remote.builder.train()
        until(lambda: remote.holds(3))


def test_once_does_not_wait_for_an_engine(tmp_path: Path) -> None:
    remote = Remote(tmp_path)
    remote.engine.gone = EngineFailed("connection refused", hint="start it")
    with pytest.raises(EngineFailed):
        asyncio.run(remote.subscriber.run(once=True))
