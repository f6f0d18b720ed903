"""`deltasync publisher run`: what its config has to say, and a clean stop. Its work: tests/publisher."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from chunkstore.posix import PosixStore
from deltasync.cli import main
from tests.subscriber.parts import small_weights
from tests.support.streams import StreamBuilder

WAIT = 60.0


def write_config(folder: Path, *more: str) -> Path:
    """A publisher.yaml whose HTTP server takes any free port."""
    path = folder / "publisher.yaml"
    store = f"store: {{url: '{folder / 'store'}'}}"
    path.write_text("\n".join([store, "inference_dtype: bfloat16", "http: {port: 0}", *more]))
    return path


def test_there_has_to_be_something_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publisher", "run", "-c", str(write_config(tmp_path, "anchors: null"))]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("error[config]: neither spool nor anchors: there is nothing to do")


def test_without_a_spool_it_keeps_the_anchors_of_a_stream(tmp_path: Path) -> None:
    builder = StreamBuilder(PosixStore(tmp_path / "store"), small_weights())
    builder.train(0.1)
    config = write_config(tmp_path, "anchors: {every: 1}")
    command = [sys.executable, "-m", "deltasync.cli", "publisher", "run", "-c", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            serving = re.search(r"serving HTTP at (127\.0\.0\.1:\d+)$", process.stderr.readline())
            assert serving is not None
            assert f"no spool: keeping the anchors of {builder.store.url}" in process.stderr.readline()
            assert urlopen(f"http://{serving[1]}/readyz", timeout=WAIT).status == 200
            assert "stored version=1 whole" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT) == 0
        finally:
            process.kill()
    assert builder.log.alternates() == [1]


def test_a_spool_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    config = write_config(tmp_path, f"spool: {tmp_path / 'file'}")
    assert main(["publisher", "run", "-c", str(config)]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("error[local_disk]: ")
    assert str(tmp_path / "file") in stderr


def test_a_port_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = write_config(tmp_path, f"spool: {tmp_path / 'spool'}")
        config.write_text(config.read_text().replace("port: 0", f"port: {port}"))
        assert main(["publisher", "run", "-c", str(config)]) == 1
    assert capsys.readouterr().err.startswith(f"error[config]: http: cannot listen on 127.0.0.1:{port}")
    assert not (tmp_path / "spool" / "publisher.sock").exists()


def test_it_waits_for_a_trainer_until_it_is_told_to_stop(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    config = write_config(tmp_path, f"spool: {spool}")
    command = [sys.executable, "-m", "deltasync.cli", "publisher", "run", "-c", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            serving = re.search(r"serving HTTP at (127\.0\.0\.1:\d+)$", process.stderr.readline())
            assert serving is not None
            assert urlopen(f"http://{serving[1]}/healthz", timeout=WAIT).status == 200
            assert f"waiting for a trainer at {spool}/publisher.sock" in process.stderr.readline()
            assert (spool / "publisher.sock").is_socket()
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT) == 0
            assert process.stderr.read().splitlines()[-1].endswith(" INFO deltasync.publisher stopped")
        finally:
            process.kill()
    assert not (spool / "publisher.sock").exists()
