"""`deltasync smoke` against real servers: each step fails for its own reason, and a subscriber never notices."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltasync.demo.sglang_server import SglangServer
from tests.sglang import oracle
from tests.sglang.conftest import Served, StartServer
from tests.sglang.training import Follower, Trainer, training
from tests.support.daemons import free_port


@pytest.fixture(scope="module")
def trainer(dense_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """Of the dense checkpoint, which is its version 0; at version 1."""
    with training(dense_checkpoint, tmp_path_factory.mktemp("trainer")) as trainer:
        trainer.publish()
        yield trainer


def smoke(
    folder: Path, store: Path, url: str, staging: str = "staging", **engine: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code and each step, by its name."""
    settings = {
        "store": {"url": str(store)},
        "state_dir": "state",
        "staging_dir": staging,
        "engine": {"type": "sglang", "servers": [{"url": url, "name": "a"}], **engine},
    }
    (folder / "subscriber.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-P", "-m", "deltasync.cli", "smoke", "-c", "subscriber.yaml", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    steps = json.loads(done.stdout)["steps"]
    assert all(step["hint"] for step in steps if step["outcome"] == "failed")
    return done.returncode, {step["name"]: step for step in steps}


def outcomes(steps: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What was not well."""
    return {name: step["outcome"] for name, step in steps.items() if step["outcome"] != "ok"}


@pytest.fixture(params=["dense", "moe"])
def served(request: pytest.FixtureRequest) -> Served:
    value: Served = request.getfixturevalue(request.param)
    return value


def test_a_server_that_is_wired_well(served: Served, tmp_path: Path) -> None:
    server = served.server
    with training(served.checkpoint, tmp_path) as trainer:
        trainer.publish()
        before = oracle.checksums(server)
        code, steps = smoke(tmp_path, trainer.store, server.url)
        assert (code, outcomes(steps)) == (0, {})
        assert list(steps) == [
            "config", "store", "stream", "versions", "staging",
            "server", "key", "plugin", "supported", "shared files", "mapping", "weights",
        ]  # fmt: skip
        assert f"on {server.options.tp_size} rank" in steps["plugin"]["detail"]
        assert steps["weights"]["detail"] == "version 0 of the stream; the newest is 1"
        assert oracle.checksums(server) == before
        assert not list((tmp_path / "staging").rglob("smoke*"))

        oracle.load_from_disk(server, trainer.export(1), version="1")
        assert smoke(tmp_path, trainer.store, server.url)[1]["weights"]["detail"].startswith("version 1 ")


def test_a_subscriber_beside_it_never_notices(dense: Served, tmp_path: Path) -> None:
    with (
        training(dense.checkpoint, tmp_path, lr=0.05) as trainer,
        Follower(dense.server.url, trainer) as follower,
    ):
        follower.reach(trainer.publish())
        errors = follower.subscriber.report.metrics.errors
        command = [sys.executable, "-c", SMOKES, dense.server.url, str(trainer.store)]
        with subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as smokes:
            assert smokes.stdin is not None
            assert smokes.stdout is not None
            for _ in range(6):  # the next smoke has begun when a version is published
                assert smokes.stdout.readline().startswith("True version ")
                follower.reach(trainer.publish())
            smokes.stdin.close()
            assert all(line.startswith("True version ") for line in smokes.stdout)
        assert smokes.returncode == 0
        assert [sample.value for metric in errors.collect() for sample in metric.samples] == []
        assert all(len(applied.manifests) == 1 for applied in follower.applied)


SMOKES = """
import asyncio, pathlib, sys, threading
from chunkstore.steps import Steps
from subscriber.config import SubscriberConfig
from subscriber.smoke import smoke

engine = {"type": "sglang", "servers": [{"url": sys.argv[1]}]}
config = SubscriberConfig.model_validate({"store": {"url": sys.argv[2]}, "state_dir": "smoke", "engine": engine})
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.is_set():
    told = []
    asyncio.run(smoke(Steps(told.append), config, lambda: None))
    print(all(step.outcome == "ok" for step in told), told[-1].detail, flush=True)
"""


def test_a_wrong_port_is_named(trainer: Trainer, tmp_path: Path) -> None:
    code, steps = smoke(tmp_path, trainer.store, f"http://127.0.0.1:{free_port()}")
    assert code == 1
    later = ("key", "plugin", "supported", "shared files", "mapping", "weights")
    assert outcomes(steps) == {"server": "failed", **dict.fromkeys(later, "skipped")}
    assert steps["server"]["kind"] == "engine_failed"
    assert "cannot be reached" in steps["server"]["detail"]


def test_a_missing_stream_is_named_and_the_server_still_checked(dense: Served, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    code, steps = smoke(tmp_path, tmp_path / "nothing", dense.server.url)
    assert code == 1
    later = ("versions", "shared files", "mapping", "weights")
    assert outcomes(steps) == {"stream": "failed", **dict.fromkeys(later, "skipped")}
    assert steps["stream"]["kind"] == "object_missing"


def test_a_staging_directory_that_the_server_does_not_see_is_named(
    trainer: Trainer, dense: Served, tmp_path: Path
) -> None:
    """As in containers: the same path leads each process somewhere else."""
    code, steps = smoke(tmp_path, trainer.store, dense.server.url, staging="/proc/self/cwd/mine")
    assert code == 1
    assert outcomes(steps) == {"shared files": "failed", "mapping": "skipped", "weights": "skipped"}
    assert "cannot be read inside the server" in steps["shared files"]["detail"]
    assert "same path" in steps["shared files"]["hint"]


def test_a_model_that_the_stream_does_not_fit_is_named(trainer: Trainer, moe: Served, tmp_path: Path) -> None:
    code, steps = smoke(tmp_path, trainer.store, moe.server.url)
    assert code == 1
    assert outcomes(steps) == {"mapping": "failed", "weights": "skipped"}
    assert steps["mapping"]["kind"] == "engine_mismatch"


def test_a_wrong_key_and_a_missing_plugin_are_told_apart(
    trainer: Trainer, start_server: StartServer, tmp_path: Path
) -> None:
    server: SglangServer = start_server(
        trainer.checkpoint, admin_api_key="secret", environment={"SGLANG_PLUGINS": "none"}
    )
    code, steps = smoke(tmp_path, trainer.store, server.url, admin_api_key="wrong")
    assert code == 1
    later = ("plugin", "supported", "shared files", "mapping", "weights")
    assert outcomes(steps) == {"key": "failed", **dict.fromkeys(later, "skipped")}
    assert "admin_api_key" in steps["key"]["hint"]

    code, steps = smoke(tmp_path, trainer.store, server.url, admin_api_key="secret")
    assert code == 1
    assert outcomes(steps) == {"plugin": "failed", **dict.fromkeys(later[1:], "skipped")}
    assert "no working deltasync plugin" in steps["plugin"]["detail"]
    assert "SGLANG_PLUGINS" in steps["plugin"]["hint"]
