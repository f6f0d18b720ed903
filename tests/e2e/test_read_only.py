"""Stores and directories that may be read and not written: said at the start, by whoever has to write there."""

import asyncio
from pathlib import Path

import pytest

from chunkstore.errors import AccessDenied
from chunkstore.posix import PosixStore
from deltasync.cli import main
from manifest.keys import SUBSCRIBERS
from subscriber.daemon import Subscriber
from subscriber.errors import StagingUnavailable
from tests.publisher.sidecars import write_config
from tests.publisher.zoo import Zoo, adamw, attach
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights, until
from tests.support.rights import read_only, without_privileges
from tests.support.streams import StreamBuilder


@pytest.mark.parametrize("existing", [False, True])
def test_a_publisher_does_not_start(existing: bool, tmp_path: Path) -> None:
    root, model = tmp_path / "store", Zoo()
    root.mkdir()
    if existing:
        attach(model, adamw(model), PosixStore(root)).close()
    before = sorted(root.rglob("*"))
    with (
        read_only(root),
        without_privileges(),
        pytest.raises(AccessDenied, match=f"{root}/probes/") as caught,
    ):
        attach(model, adamw(model), PosixStore(root))
    assert "read and write the directory" in caught.value.hint
    assert sorted(root.rglob("*")) == before


def test_a_publisher_process_compaction_and_garbage_collection_do_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compaction neither, before it asks for room to rebuild the model in."""
    root = tmp_path / "store"
    StreamBuilder(PosixStore(root), small_weights()).train()
    with read_only(root), without_privileges():
        for arguments in (
            ["publisher", "run", "-c", str(write_config(tmp_path))],
            ["store", "gc", str(root)],
            ["store", "compact", str(root), "--scratch", str(tmp_path / "nowhere")],
        ):
            assert main(arguments) == 1
            error = capsys.readouterr().err
            assert f"error[access_denied]: put_if_absent file://{root}/probes/" in error
            assert "hint: let this user read and write the directory" in error


def test_a_subscriber_follows_and_says_what_it_cannot_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    builder = StreamBuilder(PosixStore(root), small_weights())
    builder.train(steps=2)
    worker = Worker(tmp_path, builder, status_interval=0.05)
    subscriber = worker.subscriber
    with read_only(root):
        with without_privileges():
            subscriber.start()
        subscriber.wait_for(2, TIMEOUT)
        assert worker.holds(2)
        until(lambda: sum("status_not_written" in r.message for r in caplog.records) > 2)
        assert not list(builder.store.list_after(SUBSCRIBERS))
    warning = next(r.message for r in caplog.records if "status_not_written" in r.message)
    assert "kind=access_denied" in warning
    assert 'needs="put under subscribers/"' in warning
    assert subscriber.report.ready
    until(lambda: bool(list(builder.store.list_after(SUBSCRIBERS))))
    builder.train()
    subscriber.wait_for(3, TIMEOUT)
    subscriber.stop()


@pytest.mark.parametrize("which", ["state_dir", "staging_dir"])
@pytest.mark.parametrize("used", [False, True])
def test_a_subscriber_does_not_start_without_its_directories(which: str, used: bool, tmp_path: Path) -> None:
    builder = StreamBuilder(PosixStore(tmp_path / "store"), small_weights())
    folder = tmp_path / which
    folder.mkdir()
    worker = Worker(tmp_path, builder, **{which: folder})
    if used:
        worker.check_cold_start(0)
    again = Subscriber(worker.config, worker.engine)
    refused = pytest.raises(StagingUnavailable, match=f"{folder}.*Permission denied")
    with read_only(folder), without_privileges(), refused as caught:
        asyncio.run(again.run(once=True))
    assert "let this user write there" in caught.value.hint
    with running(Worker(tmp_path, builder, **{which: folder}).subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
