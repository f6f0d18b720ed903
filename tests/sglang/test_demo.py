"""`deltasync demo --engine sglang` as people run it, on the tiny model; and proof that it can fail."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deltasync.demo import add_arguments
from deltasync.demo.main import run_demo
from deltasync.demo.rows import PHASES
from tests.sglang.conftest import SGLANG_PYTHON

OPTIONS = ["--engine", "sglang", "--sglang-python", str(SGLANG_PYTHON), "--model", "tiny", "--json"]
DEMO = [sys.executable, "-m", "deltasync.cli", "demo", *OPTIONS]

PARAMETERS = 2 + 4 * 6
"""In SGLang: embedding with the tied head, last norm, and six in each of four layers, some of them fused."""

FAULTY = """
import numpy as np
from pathlib import Path
from deltasync.demo.sglang_rollout import SGLangRollout, main

class Faulty(SGLangRollout):
    # At version 1 one bit of the trainer's weights is another one, far behind the file's head.

    def compare(self, path):
        if self._version == 1:
            file = np.memmap(path, np.uint8, "r+")
            file[len(file) // 2] ^= 1
            file.flush()
        return super().compare(path)

main(Faulty)
"""


def test_demo_ends_bit_identical(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [*DEMO, "--versions", "2", "--store", "s3", "--keep", str(kept)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert "second SGLang server" in result["compared"]
    assert [row["kind"] for row in result["rows"]] == ["anchor", "delta", "delta"]
    for row in result["rows"]:
        assert row["comparison"]["tensors"] == row["model_tensors"] == PARAMETERS
        assert row["comparison"]["problems"] == []
        assert row["comparison"]["elements"] > row["elements"], "the trainer's file has the tied head twice"
    for row in result["rows"][1:]:
        assert set(row["seconds"]) == set(PHASES)
        assert 0 < row["seconds"]["scatter"] <= row["seconds"]["pause"]
        assert row["times_smaller"] > 3
    assert not list(kept.rglob("*.safetensors")), (
        "the server started with noise, and the comparison's files are gone"
    )
    log = (kept / "logs" / "subscriber.log").read_text()
    assert re.findall(r" applied version=(\d+) ", log) == ["0", "1", "2"]
    assert "httpx" not in log


def test_one_wrong_bit_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([*OPTIONS, "--versions", "2"])
    assert run_demo(args, rollout=(sys.executable, "-c", FAULTY, str(SGLANG_PYTHON))) == 1
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["rows"]
    assert [row["identical"] for row in rows] == [True, False, True]
    (problem,) = rows[1]["comparison"]["problems"]
    assert re.fullmatch(r"rank 0: .* has another checksum", problem)
    assert "NOT bit-identical" in captured.err


def test_an_interrupted_start_leaves_nothing_behind(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(DEMO, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as demo:
        deadline, pause = time.monotonic() + 120, threading.Event()
        while len(servers(temporary)) < 2:
            assert time.monotonic() < deadline, "the servers were not started"
            pause.wait(0.1)
        started = servers(temporary)
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 128 + signal.SIGTERM
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert list(temporary.iterdir()) == []


def servers(temporary: Path) -> set[int]:
    """SGLang's processes of the demo whose temporary files are in `temporary`."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if "sglang.launch_server" in command and str(temporary) in command:
            found.add(int(entry.name))
    return found
