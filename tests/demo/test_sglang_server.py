"""Starting and ending a server's processes; a script stands in for SGLang's Python, so this needs no SGLang."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from deltasync.demo.errors import DemoFailed
from deltasync.demo.sglang_server import SglangOptions, SglangServer, find_sglang

SERVES = """
import http.server, os, subprocess, sys, tempfile
arguments = sys.argv[1:]
child = subprocess.Popen(["sleep", "1000"])  # as a scheduler process: a child of the server, in its group
print("child", child.pid, "temporary", tempfile.gettempdir(), flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 2 and self.path == "/health_generate" else 503)
        self.end_headers()
        self.wfile.write(self.headers.get("Authorization", "").encode())

port = int(arguments[arguments.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


TRACKED = """
import multiprocessing
semaphore = multiprocessing.get_context("spawn").Semaphore()  # has a name until a process of its own removes it
print("semaphore", semaphore._semlock.name.strip("/"))
"""


def fake_python(folder: Path, program: str) -> Path:
    """An executable that runs `program` whatever module it is asked for, with the arguments of that."""
    script = folder / "program.py"
    script.write_text(program)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    return python


def start(folder: Path, program: str, **options: str) -> SglangServer:
    settings = SglangOptions(python=fake_python(folder, program), model=folder, **options)  # type: ignore[arg-type]
    return SglangServer(settings, folder / "server.log")


def alive(pid: int) -> bool:
    """Whether a process runs: not gone, and not a zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ready_means_it_generates_and_stop_leaves_nothing(tmp_path: Path) -> None:
    with start(tmp_path, TRACKED + SERVES, admin_api_key="sesame").wait_ready(60) as server:
        words = server.log.read_text().split()
        semaphore, child, temporary = Path(f"/dev/shm/sem.{words[1]}"), int(words[3]), Path(words[5])
        assert semaphore.exists()
        assert {server.pid, child} <= set(server.pids())
        assert temporary.is_dir()
        with server.client(10) as client:
            assert client.get("/health_generate").text == "Bearer sesame"
    assert server.pids() == ()
    assert not alive(child)
    assert not temporary.exists()
    assert not semaphore.exists()
    assert not server.running
    server.stop()


def test_sockets_find_room_for_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with start(tmp_path, TRACKED + SERVES).wait_ready(60) as server:
        temporary = Path(server.log.read_text().split()[5])
        assert len(str(temporary)) < 80
    assert not temporary.exists()


def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    program = "import sys; print('no such model'); sys.exit(3)"
    with (
        start(tmp_path, program) as server,
        pytest.raises(DemoFailed, match=r"(?s)ended with exit code 3 before it was ready.*no such model"),
    ):
        server.wait_ready(60)


def test_a_server_that_never_serves_is_reported(tmp_path: Path) -> None:
    with (
        start(tmp_path, "import signal; print('loading', flush=True); signal.pause()") as server,
        pytest.raises(DemoFailed, match="not ready within 0 s"),
    ):
        server.wait_ready(0)
    assert server.pids() == ()


def test_stop_ends_the_children_of_a_server_that_was_killed(tmp_path: Path) -> None:
    with start(tmp_path, SERVES).wait_ready(60) as server:
        os.kill(server.pid, signal.SIGKILL)
    assert server.pids() == ()


def test_a_missing_environment_is_an_error_that_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match="there is no SGLang environment") as caught:
        SglangServer(SglangOptions(python=tmp_path / "none", model=tmp_path), tmp_path / "log")
    assert "make venv-sglang" in caught.value.hint


OWNER = """
import sys
from pathlib import Path
from deltasync.demo.sglang_server import SglangOptions, SglangServer
folder = Path(sys.argv[1])
server = SglangServer(SglangOptions(python=folder / "python", model=folder), folder / "server.log").wait_ready(60)
print(*server.pids(), flush=True)
sys.stdin.read()
"""


def test_a_server_ends_with_the_process_that_started_it_however_that_ends(tmp_path: Path) -> None:
    fake_python(tmp_path, SERVES)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # nobody is left to remove its temporary files
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        owner.kill()
    pause = threading.Event()
    while any(alive(pid) for pid in pids):  # the suite's time limit ends it
        pause.wait(0.01)


def test_sglangs_environment_is_found_or_the_error_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = tmp_path / ".venv-sglang" / "bin" / "python"
    here.parent.mkdir(parents=True)
    here.touch()
    assert find_sglang() == here
    with pytest.raises(DemoFailed, match="elsewhere do not exist") as caught:
        find_sglang(Path("elsewhere"))
    assert "make venv-sglang" in caught.value.hint
