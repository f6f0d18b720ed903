"""`deltasync store check` on stores that qualify, and on those that do, one thing each, what a store must not do."""

import json
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from moto.s3.models import S3Backend

from chunkstore import qualify
from chunkstore.errors import StoreUnavailable
from chunkstore.memory import MemoryStore
from chunkstore.open import StoreConfig, open_store
from chunkstore.retry import Backoff
from chunkstore.steps import Step, Steps
from chunkstore.store import Store
from deltasync.cli import main
from deltasync.s3server import BUCKET
from tests.support.gateways import IgnoresConditions, OnePageOnly, RemembersMissing
from tests.support.iam import Policy, enforcing, serving

STEPS = (
    "list", "missing", "create", "read", "replace", "delete", "exclusive", "race", "visible", "pages", "sizes", "clock",
    "clean",
)  # fmt: skip

Outcomes = dict[str, Step]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short races and small objects, where the test is about something else."""
    monkeypatch.setattr(qualify, "_RACE_SECONDS", 0.0)
    monkeypatch.setattr(qualify, "_RACED_AT_LEAST", 2)
    monkeypatch.setattr(qualify, "_ROUNDS", 1)
    monkeypatch.setattr(qualify, "_SIZES", (0, 1, 1000))


def at(endpoint: str) -> StoreConfig:
    url = f"s3://{BUCKET}/qualify/{uuid.uuid4().hex}"
    return StoreConfig(url=url, endpoint_url=endpoint, path_style=True, retry_deadline=0.2)


def check(config: StoreConfig) -> Outcomes:
    told: list[Step] = []
    qualify.qualify(Steps(told.append), partial(open_store, config))
    assert [step.name for step in told] == list(STEPS)
    return {step.name: step for step in told}


def failed(outcomes: Outcomes) -> dict[str, str]:
    """Kind of error by the name of the step."""
    return {name: str(step.kind) for name, step in outcomes.items() if step.outcome == "failed"}


def test_a_real_server_qualifies(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(qualify, "_RACE_SECONDS", 0.5)
    config = at(s3_endpoint)
    options = [config.url, "--endpoint-url", s3_endpoint, "--path-style"]
    assert main(["store", "check", *options]) == 0
    *steps, verdict, then = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split() for line in steps] == [["ok", name] for name in STEPS]
    assert verdict == f"{config.url} qualifies"
    assert f'"url": "{config.url}", "endpoint_url": "{s3_endpoint}", "path_style": true' in then
    assert list(open_store(config).list_after("")) == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["posix", "memory"])
def test_a_store_on_this_machine_qualifies(
    kind: str, config_of: Callable[[str], StoreConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(kind)
    store = open_store(config)
    store.put("versions/0", b"of a stream that is there")
    assert main(["store", "check", config.url, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert [(step["name"], step["outcome"]) for step in document["steps"]] == [(name, "ok") for name in STEPS]
    assert [info.key for info in store.list_after("")] == ["versions/0"]
    assert list(store.temporaries()) == []


@pytest.fixture
def slow_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment between moto's check and its write, as busy machines and slow disks have it."""
    real = S3Backend.put_object

    def put_object(self: S3Backend, bucket: str, key: str, *args: Any, **kwargs: Any) -> Any:
        if "/race/" in key:
            time.sleep(0.02)
        return real(self, bucket, key, *args, **kwargs)

    monkeypatch.setattr(S3Backend, "put_object", put_object)


@pytest.mark.usefixtures("quick", "slow_puts")
def test_two_winners_of_a_race_are_refused(plain_moto: str) -> None:
    """Plain moto gets the sequential probe right, and checks before it puts, with nothing to keep others away."""
    config = at(plain_moto)
    outcomes = check(config)
    assert outcomes["exclusive"].outcome == "ok"
    assert failed(outcomes) == {"race": "store_unsuitable"}
    assert "writers of probes/" in outcomes["race"].detail
    assert "were told that they created it" in outcomes["race"].detail
    assert list(open_store(config).list_after("")) == []


@pytest.mark.usefixtures("quick", "s3_server")
def test_a_gateway_that_ignores_conditions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """FIELD_REPORTS: minio#21603, juicefs gateway."""
    with serving(IgnoresConditions) as (_, endpoint):
        config = at(endpoint)
        options = [config.url, "--endpoint-url", endpoint, "--path-style"]
        assert main(["store", "check", *options]) == 1
        said = capsys.readouterr().out
        assert "FAILED  exclusive: error[store_unsuitable]: " in said
        assert "hint: publish to a store that honours If-None-Match on PutObject" in said
        assert "skipped race: needs: exclusive" in said
        assert said.splitlines()[-2:][0] == "1 step failed"
        assert said.splitlines()[-1].startswith("next: ")
        assert main(["store", "check", *options, "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        assert [step["name"] for step in document["steps"] if step["outcome"] == "failed"] == ["exclusive"]
        assert list(open_store(config).list_after("")) == []


@pytest.mark.usefixtures("quick", "s3_server")
def test_a_cache_that_remembers_what_was_missing_is_refused() -> None:
    with serving(RemembersMissing) as (_, endpoint):
        outcomes = check(at(endpoint))
    assert failed(outcomes) == {"visible": "store_unsuitable"}
    assert "head says that it is missing" in outcomes["visible"].detail
    assert "no cache in front of it" in outcomes["visible"].hint


@pytest.mark.usefixtures("quick", "s3_server")
def test_listings_that_end_after_a_page_are_refused() -> None:
    with serving(OnePageOnly) as (_, endpoint):
        outcomes = check(at(endpoint))
    assert failed(outcomes) == {"pages": "store_unsuitable"}


ALLOWED = {
    "list": ("s3:ListBucket", "arn:aws:s3:::BUCKET"),
    "read": ("s3:GetObject", "arn:aws:s3:::BUCKET/*"),
    "write": ("s3:PutObject", "arn:aws:s3:::BUCKET/*"),
    "delete": ("s3:DeleteObject", "arn:aws:s3:::BUCKET/*"),
}


@pytest.mark.parametrize(
    ("lacking", "steps", "permission"),
    [
        ("list", ["list"], "s3:ListBucket"),
        ("read", ["missing", "read"], "s3:GetObject"),
        ("write", ["create"], "s3:PutObject"),
        ("delete", ["delete"], "s3:DeleteObject"),
    ],
)
@pytest.mark.usefixtures("quick", "s3_server")
def test_a_missing_permission_is_named(lacking: str, steps: list[str], permission: str) -> None:
    statements = [
        {"Sid": name, "Effect": "Allow", "Action": action, "Resource": resource}
        for name, (action, resource) in ALLOWED.items()
        if name != lacking
    ]
    policy = Policy.parse(json.dumps({"Version": "2012-10-17", "Statement": statements}), BUCKET=BUCKET)
    with enforcing(policy) as endpoint:
        outcomes = check(at(endpoint))
    assert dict.fromkeys(steps, "access_denied").items() <= failed(outcomes).items()
    assert set(failed(outcomes).values()) == {"access_denied"}
    assert permission in outcomes[steps[-1]].hint or permission in outcomes[steps[0]].hint


def test_a_store_that_does_not_answer(aws: None) -> None:
    outcomes = check(at("http://127.0.0.1:9"))
    assert failed(outcomes) == dict.fromkeys(["list", "missing", "create"], "store_unavailable")
    assert {step.outcome for name, step in outcomes.items() if name not in failed(outcomes)} == {"skipped"}


def test_a_file_system_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcomes = check(StoreConfig(url=str(tmp_path / "file" / "store")))
    assert outcomes["create"].outcome == "failed"
    assert "s3:" not in outcomes["create"].hint


def test_no_credentials_are_told_from_such_that_lack_a_permission(
    aws: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    outcomes = check(at("http://127.0.0.1:9"))
    assert failed(outcomes) == dict.fromkeys(["list", "missing", "create"], "access_denied")
    assert outcomes["list"].hint.startswith("set AWS_ACCESS_KEY_ID and ")
    assert outcomes["list"].hint.endswith("(s3:ListBucket)")


def test_a_store_that_keeps_a_command_waiting_is_told_of_once(
    aws: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chunkstore.open.Backoff", lambda deadline: Backoff(deadline=1.0, first=0.01))
    assert main(["status", "s3://bucket/run", "--endpoint-url", "http://127.0.0.1:9"]) == 1
    waiting, error, hint = capsys.readouterr().err.splitlines()
    assert waiting.startswith("waiting: get s3://bucket/run/stream.msgpack: EndpointConnectionError")
    assert error.startswith("error[store_unavailable]: ")
    assert hint == f"hint: {StoreUnavailable.usual_hint}"


def test_a_store_to_read_from_only(tmp_path: Path) -> None:
    outcomes = check(StoreConfig(url=f"local://{tmp_path}"))
    assert failed(outcomes) == {"create": "store_unsuitable"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("ahead", "words"), [(3600.0, "3600.0 s ahead"), (-7200.0, "7200.0 s behind"), (0.0, "0.0 s")]
)
def test_clocks_that_differ_are_told(ahead: float, words: str) -> None:
    """Of no consequence to the protocol, which goes by the store's clock alone."""
    held = MemoryStore(clock=lambda: time.time() + ahead)

    def client(*, page: int = 1000, hold: object = None) -> Store:
        return held

    told: list[Step] = []
    qualify.qualify(Steps(told.append), client)
    clock = next(step for step in told if step.name == "clock")
    assert clock.outcome == "ok"
    assert words in clock.detail
    assert ("S3 refuses requests" in clock.detail) == (ahead != 0)


@pytest.mark.usefixtures("quick")
def test_bytes_that_change_on_the_way_are_found() -> None:
    class Padded(MemoryStore):
        def get(self, key: str, *, limit: int) -> bytes:
            data = super().get(key, limit=limit)
            return data[:-1] + b"?" if len(data) == 1000 else data

    held = Padded()

    def client(*, page: int = 1000, hold: object = None) -> Store:
        return held

    told: list[Step] = []
    qualify.qualify(Steps(told.append), client)
    assert [step.name for step in told if step.outcome == "failed"] == ["sizes"]
    assert any("get gives 1000 other bytes, a ranged get the same" in step.detail for step in told)
