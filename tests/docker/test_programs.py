"""The compose demo's two programs, as processes on this machine: every version travels from one to the other."""

import os
import subprocess
import sys
from pathlib import Path

from chunkstore.posix import PosixStore
from deltasync.demo.model import prepare_model
from deltasync.overview import overview

DOCKER = Path(__file__).resolve().parents[2] / "docker"
WAIT = 240.0
VERSIONS = 2


def start(program: str, config: Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable, str(DOCKER / program), "--config", str(config), "--model", "tiny",
            "--models", str(folder / "models"), "--samples", str(folder / "samples"), "--versions", str(VERSIONS),
        ],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def adapt(config: Path, folder: Path, **values: str) -> Path:
    """The compose file's config with another store and other folders."""
    import yaml

    settings = yaml.safe_load(config.read_text()) | values | {"store": {"url": str(folder / "store")}}
    if "http" in settings:
        settings["http"] = {"port": 0}
    path = folder / config.name
    path.write_text(yaml.safe_dump(settings))
    return path


def test_the_rollout_worker_samples_every_version_and_the_trainer_learns_from_it(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    checkpoint = prepare_model("tiny", tmp_path / "models")
    publisher = adapt(DOCKER / "publisher.yaml", tmp_path, base_checkpoint=str(checkpoint))
    subscriber = adapt(DOCKER / "subscriber.yaml", tmp_path, state_dir=str(tmp_path / "state"))
    trainer = start("trainer.py", publisher, tmp_path)
    rollout = start("rollout.py", subscriber, tmp_path)
    try:
        for process in (rollout, trainer):
            _, stderr = process.communicate(timeout=WAIT)
            assert process.returncode == 0, stderr
    finally:
        for process in (rollout, trainer):
            process.kill()
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["0.json", "1.json", "2.json"]
    seen = overview(PosixStore(tmp_path / "store"), 0.0)
    (worker,) = seen.subscribers
    assert (seen.newest, worker.status.applied_version, worker.status.state) == (VERSIONS, VERSIONS, "stopped")
