"""`deltasync smoke` for an engine of the torch kind, and everything that all kinds have in common."""

import json
import re
import sys
from pathlib import Path

import pytest

from chunkstore.posix import PosixStore
from deltasync.cli import main
from tests.support.streams import StreamBuilder, random_weights

FACTORY = """
import torch

def build():
    return torch.nn.Linear(50, 40, dtype=torch.bfloat16)

def other():
    return torch.nn.Linear(50, 41, dtype=torch.bfloat16)
"""


@pytest.fixture
def stream(tmp_path: Path) -> StreamBuilder:
    """Versions 0 … 2 of the factory's model."""
    shapes: dict[str, tuple[int, ...]] = {"weight": (40, 50), "bias": (40,)}
    built = StreamBuilder(PosixStore(tmp_path / "store"), random_weights(shapes))
    built.train(steps=2)
    return built


@pytest.fixture(autouse=True)
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rollout.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rollout", raising=False)


class Smoke:
    """Runs the command and keeps what it said of each step."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, factory: str = "build", **changes: object) -> dict[str, str]:
        """Outcome and words of each step, by its name."""
        settings = {
            "store": {"url": str(self.folder / "store")},
            "state_dir": str(self.folder / "state"),
            "engine": {"type": "torch", "factory": f"my_rollout:{factory}"},
        }
        path = self.folder / "subscriber.yaml"
        path.write_text(json.dumps(settings | changes))
        code = main(["smoke", "-c", str(path)])
        *lines, self.verdict = self._capsys.readouterr().out.splitlines()
        steps = [line for line in lines if not line.startswith(" ")]
        assert code == int(any(line.startswith("FAILED") for line in steps))
        self.hints = [line.strip() for line in lines if line.startswith(" ")]
        found = [re.fullmatch(r"(ok|FAILED|skipped) +([a-z]+): (.*)", line, re.DOTALL) for line in steps]
        return {match[2]: f"{match[1]} {match[3]}" for match in found if match is not None}


@pytest.fixture
def smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Smoke:
    return Smoke(tmp_path, capsys)


def test_everything_is_well_and_nothing_is_left_behind(
    stream: StreamBuilder, smoke: Smoke, tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()}
    steps = smoke()
    assert list(steps) == ["config", "store", "stream", "versions", "staging", "factory", "weights"]
    assert all(words.startswith("ok ") for words in steps.values())
    assert smoke.verdict == "all is well"
    assert "the newest is 2; a new engine starts from the anchor of 0" in steps["versions"]
    assert "no version of the stream" in steps["weights"]
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert after == before
    assert not [path for path in (tmp_path / "state").rglob("*") if "smoke" in path.name]


def test_numbers_are_for_people(smoke: Smoke, tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"weight": (40, 50), "bias": (40,)}
    StreamBuilder(PosixStore(tmp_path / "store"), random_weights(shapes))
    steps = smoke()
    assert re.search(r"anchor of 0, [\d.]+ kB in 1 step; 2 tensors", steps["versions"])
    assert re.search(r"can be written; [\d.]+ [MGT]B are free", steps["staging"])


def test_json_says_the_same(
    stream: StreamBuilder, smoke: Smoke, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smoke(factory="other")
    assert main(["smoke", "--json", "-c", str(tmp_path / "subscriber.yaml")]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    outcomes = {step["name"]: (step["outcome"], step["kind"]) for step in document["steps"]}
    assert outcomes["factory"] == ("ok", None)
    assert outcomes["weights"] == ("failed", "engine_mismatch")


def test_a_wrong_key_of_the_config_is_all_that_is_said(smoke: Smoke) -> None:
    steps = smoke(poll_intervall=1)
    assert list(steps) == ["config"]
    assert steps["config"].startswith("FAILED error[config]: ")


def test_a_key_file_that_cannot_be_used_is_told_of_the_config(
    stream: StreamBuilder, smoke: Smoke, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {"type": "sglang", "servers": [{"url": "http://127.0.0.1:9"}], "api_key_file": f"{tmp_path}/no"}
    config = tmp_path / "subscriber.yaml"
    words = f"{config}: engine.api_key_file: {tmp_path}/no cannot be read: No such file or directory"
    assert smoke(engine=engine)["config"] == f"FAILED error[engine_denied]: {words}"
    assert main(["smoke", "--json", "-c", str(config)]) == 1
    outcomes = {step["name"]: step["outcome"] for step in json.loads(capsys.readouterr().out)["steps"]}
    assert outcomes.pop("config") == "failed"
    assert {name for name, outcome in outcomes.items() if outcome == "ok"} == {
        "store",
        "stream",
        "versions",
        "staging",
    }
    assert set(outcomes.values()) == {"ok", "skipped"}


def test_a_config_without_engine_is_no_set_up(smoke: Smoke) -> None:
    assert "engine: is required" in smoke(engine=None)["config"]


def test_a_folder_that_is_not_there_is_not_a_missing_stream(smoke: Smoke, tmp_path: Path) -> None:
    steps = smoke()
    assert steps["store"] == f"FAILED error[access_denied]: {(tmp_path / 'store').as_uri()} is not there"
    assert steps["stream"] == "skipped needs: store"


def test_a_missing_stream_skips_what_needs_it(smoke: Smoke, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    steps = smoke()
    assert steps["store"].startswith("ok ")
    assert steps["stream"].startswith("FAILED error[object_missing]: there is no stream at ")
    assert steps["versions"] == "skipped needs: stream"
    assert steps["staging"].startswith("ok ")
    assert steps["factory"].startswith("ok ")
    assert steps["weights"] == "skipped needs: versions"
    assert smoke.hints == ["hint: check the URL; a publisher creates the stream when it first attaches"]
    assert smoke.verdict == "1 step failed"


def test_a_store_that_cannot_be_reached_is_not_a_missing_stream(
    smoke: Smoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    unreachable = {"url": "s3://bucket/run", "endpoint_url": "http://127.0.0.1:9", "retry_deadline": 0.1}
    steps = smoke(store=unreachable)
    assert steps["store"].startswith("FAILED error[store_unavailable]: ")
    assert steps["stream"] == "skipped needs: store"


def test_a_directory_that_cannot_be_written_is_named(
    stream: StreamBuilder, smoke: Smoke, tmp_path: Path
) -> None:
    (tmp_path / "state").touch()
    assert smoke()["staging"].startswith(f"FAILED error[staging_unavailable]: {tmp_path}/state/staging/")


@pytest.mark.parametrize(
    ("factory", "step", "words"),
    [
        ("missing", "factory", "has no function 'missing'"),
        ("other", "weights", "'weight' has shape"),
    ],
)
def test_a_module_that_does_not_fit_is_named(
    stream: StreamBuilder, smoke: Smoke, factory: str, step: str, words: str
) -> None:
    steps = smoke(factory=factory)
    assert steps[step].startswith("FAILED ")
    assert words in steps[step]
