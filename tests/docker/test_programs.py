"""The compose demo's programs, as processes on this machine: every version travels from trainer to rollout worker."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from chunkstore.posix import PosixStore
from deltasync.demo.model import prepare_model
from deltasync.overview import overview

DOCKER = Path(__file__).resolve().parents[2] / "docker"
WAIT = 240.0
VERSIONS = 2


@contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, killed at the end if it still runs."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end, which has to be a good one; returns what it logged."""
    _, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == 0, stderr
    return stderr


def program(name: str, config: Path, folder: Path) -> list[str]:
    folders = ["--models", str(folder / "models"), "--samples", str(folder / "samples")]
    options = ["--config", str(config), "--model", "tiny", "--versions", str(VERSIONS)]
    return [sys.executable, str(DOCKER / name), *options, *folders]


def adapt(config: Path, folder: Path, **values: Any) -> Path:
    """The compose file's config with another store and other folders."""
    settings = yaml.safe_load(config.read_text()) | values | {"store": {"url": str(folder / "store")}}
    path = folder / config.name
    path.write_text(yaml.safe_dump(settings))
    return path


def test_every_version_travels_from_the_trainer_to_the_rollout_worker(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    checkpoint = prepare_model("tiny", tmp_path / "models")
    publisher_yaml = adapt(
        DOCKER / "publisher.yaml",
        tmp_path,
        base_checkpoint=str(checkpoint),
        spool=str(tmp_path / "spool"),
        http={"port": 0},
    )
    subscriber_yaml = adapt(
        DOCKER / "subscriber.yaml", tmp_path, state_dir=str(tmp_path / "state"), http={"port": 0}
    )
    daemon = [sys.executable, "-m", "deltasync.cli", "publisher", "run", "-c", str(publisher_yaml)]
    with ExitStack() as stack:
        publisher = stack.enter_context(running(daemon))
        trainer = stack.enter_context(running(program("trainer.py", publisher_yaml, tmp_path)))
        rollout = stack.enter_context(running(program("rollout.py", subscriber_yaml, tmp_path)))
        finish(rollout)
        finish(trainer)
        publisher.terminate()
        assert f"the trainer has left at version {VERSIONS}" in finish(publisher)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["0.json", "1.json", "2.json"]
    seen = overview(PosixStore(tmp_path / "store"), 0.0)
    (worker,) = seen.subscribers
    assert (seen.newest, worker.status.applied_version, worker.status.state) == (
        VERSIONS,
        VERSIONS,
        "stopped",
    )
