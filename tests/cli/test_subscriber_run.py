"""`deltasync subscriber run` as a process: it fills a model from a config's factory, reports, and stops cleanly."""

import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from chunkstore.posix import PosixStore
from deltasync.cli import main
from subscriber.journal import locked, locked_folder
from subscriber.status import SubscriberStatus
from tests.support.daemons import WAIT, command, daemon, free_port
from tests.support.streams import StreamBuilder, random_weights

FACTORY = """
import torch

def build():
    model = torch.nn.Linear(50, 40, dtype=torch.bfloat16)
    return model

def wrong():
    return "a model"

def nothing():
    pass

def failing():
    return open("no-such-weights.bin")

def importing():
    import no_such_package
"""


@pytest.fixture
def stream(tmp_path: Path) -> StreamBuilder:
    """Versions 0 … 2 of the factory's model."""
    shapes: dict[str, tuple[int, ...]] = {"weight": (40, 50), "bias": (40,)}
    built = StreamBuilder(PosixStore(tmp_path / "store"), random_weights(shapes))
    built.train(steps=2)
    return built


@pytest.fixture
def config(stream: StreamBuilder, tmp_path: Path) -> Path:
    (tmp_path / "my_rollout.py").write_text(FACTORY)
    return write_config(tmp_path)


def write_config(folder: Path, factory: str = "my_rollout:build") -> Path:
    path = folder / "subscriber.yaml"
    path.write_text(
        f"store: {{url: '{folder / 'store'}'}}\nid: rollout-1\nstate_dir: {folder / 'state'}\npoll_interval: 0.1\n"
        f"http: {{port: 0}}\nengine: {{type: torch, factory: '{factory}'}}\n"
    )
    return path


def run(config: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(config, *more), cwd=config.parent, capture_output=True, text=True, check=False, timeout=WAIT
    )


def status_of(stream: StreamBuilder) -> SubscriberStatus:
    return SubscriberStatus.model_validate_json(stream.store.get("subscribers/rollout-1.json", limit=1 << 20))


def test_once_catches_up_and_ends(stream: StreamBuilder, config: Path) -> None:
    done = run(config, "--once")
    assert done.returncode == 0, done.stderr
    seen = status_of(stream)
    assert (seen.state, seen.applied_root) == ("stopped", stream.manifests[2].root.hex())
    assert re.search(r"Z INFO deltasync\.subscriber applied version=2 ", done.stderr)


def test_until_version_ends_there(stream: StreamBuilder, config: Path) -> None:
    done = run(config, "--until-version", "1")
    assert done.returncode == 0, done.stderr
    version = status_of(stream).applied_version
    assert version is not None
    assert version >= 1


def test_a_daemon_follows_until_it_is_told_to_stop(stream: StreamBuilder, config: Path) -> None:
    with daemon(config) as running:
        running.wait_for(r"applied version=2 ")
        newest = stream.train().version
        running.wait_for(rf"applied version={newest} ")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(WAIT) == 0
    assert status_of(stream).state == "stopped"


def test_health_and_status_are_served(stream: StreamBuilder, config: Path) -> None:
    free = free_port()
    config.write_text(config.read_text().replace("port: 0", f"port: {free}"))
    with daemon(config) as running:
        running.wait_for(r"applied version=2 ")
        base = f"http://127.0.0.1:{free}"
        assert urlopen(f"{base}/healthz", timeout=WAIT).status == 200
        assert json.load(urlopen(f"{base}/status", timeout=WAIT))["applied_version"] == 2
        with pytest.raises(HTTPError):
            urlopen(f"{base}/nothing", timeout=WAIT)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(WAIT) == 0


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("my_rollout:wrong", "engine.factory: 'my_rollout:wrong' returned str, not a torch.nn.Module"),
        (
            "my_rollout:nothing",
            "engine.factory: 'my_rollout:nothing' returned NoneType, not a torch.nn.Module",
        ),
        ("my_rollout:failing", "engine.factory: 'my_rollout:failing' raised FileNotFoundError: "),
        ("my_rollout:failing", "'no-such-weights.bin'"),
        ("my_rollout:importing", "raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("broken_rollout:build", "importing 'broken_rollout' raised ValueError: not today"),
        ("my_rollout:missing", "has no function 'missing'"),
        ("not_there:build", "module 'not_there' cannot be imported"),
    ],
)
def test_a_factory_that_cannot_be_used_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    factory: str,
    message: str,
) -> None:
    (tmp_path / "my_rollout.py").write_text(FACTORY)
    (tmp_path / "broken_rollout.py").write_text("raise ValueError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rollout", raising=False)
    assert main(["subscriber", "run", "-c", str(write_config(tmp_path, factory)), "--once"]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("error[config]: ")
    assert message in stderr
    assert "\nhint: " in stderr
    assert "Traceback" not in stderr


def test_a_state_directory_that_cannot_be_made_is_named(config: Path, tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    done = run(config, "--once")
    assert done.returncode == 1
    assert f"error[staging_unavailable]: {tmp_path / 'state'}/rollout-1 cannot be used: " in done.stderr
    assert "\nhint: let this user write there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["staging_unavailable", "subscriber_busy", "staging", "config"])
def test_what_would_end_the_run_is_told_before_the_factory_is_called(
    config: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, "my_rollout:failing")
    with ExitStack() as stack:
        if kind == "staging_unavailable":
            (tmp_path / "state").write_text("a file")
        elif kind == "subscriber_busy":
            stack.enter_context(locked(tmp_path / "state" / "rollout-1"))
        elif kind == "staging":
            stack.enter_context(locked_folder(tmp_path / "state" / "staging" / "rollout-1"))
        else:
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            config.write_text(config.read_text().replace("port: 0", f"port: {taken}"))
        assert main(["subscriber", "run", "-c", str(config), "--once"]) == 1
    said = capsys.readouterr().err
    assert f"error[{'subscriber_busy' if kind == 'staging' else kind}]: " in said
    assert "my_rollout:failing" not in said


def test_an_engine_is_required(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "subscriber.yaml"
    path.write_text(f"store: {{url: '{tmp_path / 'store'}'}}\n")
    assert main(["subscriber", "run", "-c", str(path)]) == 1
    assert "engine: is required to run a daemon" in capsys.readouterr().err
