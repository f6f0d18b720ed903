"""Credentials that run out in the middle: said by name on both sides, nothing is lost, and fresh ones are found."""

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from chunkstore.errors import AccessDenied, CredentialsExpired, DeltasyncError
from chunkstore.metrics import StoreMetrics
from chunkstore.open import StoreConfig, open_store
from chunkstore.store import Store
from deltasync.s3server import BUCKET, EmbeddedS3Server
from manifest.errors import CommitUnknown
from manifest.verify import verify_stream
from publisher.publisher import Publisher
from publisher.report import Report
from subscriber.config import SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.torch_engine import TorchEngine
from tests.publisher.sidecars import WAIT, sidecar_thread, write_config
from tests.publisher.zoo import Zoo, adamw, assert_identical, attach, published, train
from tests.subscriber.parts import TIMEOUT, live_bits, running, until
from tests.support.iam import Expiring, expiring


class Keys:
    """The credentials of this process: in a file, or from a command that prints them and when they end."""

    def __init__(self, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.file = source, folder / "credentials"
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        config = folder / "config"
        config.write_text(f"[default]\ncredential_process = cat {self.file}\n" if source == "command" else "")
        values = {
            "AWS_CONFIG_FILE": config,
            "AWS_SHARED_CREDENTIALS_FILE": self.file if source == "file" else folder / "none",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    def give(self, key: str) -> None:
        """From now on there are these."""
        if self.source == "file":
            text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n"
        else:
            end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
            text = json.dumps(
                {"Version": 1, "AccessKeyId": key, "SecretAccessKey": "secret", "SessionToken": "t", "Expiration": end}
            )  # fmt: skip
        temporary = self.file.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.file)

    def take(self) -> None:
        """There are none any more, or only old ones."""
        if self.source == "command":
            self.file.unlink()


class World:
    """A stream in a bucket behind a front that knows which access key is valid."""

    def __init__(self, front: Expiring, endpoint: str, server: EmbeddedS3Server) -> None:
        self.front = front
        url = f"s3://{BUCKET}/runs/{uuid.uuid4().hex}"
        self.config = StoreConfig(url=url, endpoint_url=endpoint, path_style=True, retry_deadline=0.2)
        self.behind = StoreConfig(url=url, endpoint_url=server.url, path_style=True)

    @property
    def store(self) -> Store:
        return open_store(self.config)


@contextmanager
def running_world(code: str) -> Iterator[World]:
    with EmbeddedS3Server() as server, expiring(code, "OLD") as (front, endpoint):
        yield World(front, endpoint, server)


CASES = [
    ("file", "ExpiredToken", CredentialsExpired),
    ("file", "InvalidAccessKeyId", AccessDenied),
    ("command", "ExpiredToken", CredentialsExpired),
]


@pytest.mark.parametrize(("source", "code", "kind"), CASES)
def test_both_sides_say_so_and_go_on(
    source: str, code: str, kind: type[DeltasyncError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(source, tmp_path, monkeypatch)
    keys.give("OLD")
    model, rollout = Zoo(), Zoo().to(torch.bfloat16)
    optimizer = adamw(model)
    with running_world(code) as world:
        config = SubscriberConfig(
            store=world.config, id="s", state_dir=tmp_path, http=None, poll_interval=0.1
        )
        subscriber = Subscriber(config, TorchEngine(rollout))
        with attach(model, optimizer, world.store) as publisher, running(subscriber):
            subscriber.wait_for(0, TIMEOUT)
            keys.take()
            world.front.valid = "NEW"
            for step in (1, 2):
                train(model, optimizer, step)
                with pytest.raises(kind) as caught:
                    publisher.publish(step).result()
                assert type(caught.value) is kind
                assert caught.value.action == "retry"
                assert caught.value.hint
            until(lambda: _last_kind(subscriber) == kind.kind)
            assert subscriber.report.ready
            assert subscriber.version == 0
            keys.give("NEW")
            train(model, optimizer, 3)
            commit = publisher.publish(3).result()
            assert commit is not None
            assert (commit.version, commit.manifest.optimizer_steps) == (1, 3)
            assert commit.manifest.stats.unproved_blocks == 0
            assert_identical(publisher, model, world.store, 1)
            subscriber.wait_for(1, TIMEOUT)
            until(lambda: _last_kind(subscriber) is None)
        live = rollout.state_dict()
        assert all(
            (live_bits(live[n]).ravel() == bits).all() for n, bits in published(world.store, 1).items()
        )
        assert verify_stream(world.store).ok


def _last_kind(subscriber: Subscriber) -> str | None:
    error = subscriber.report.status().last_error
    return None if error is None else error.kind


@pytest.mark.parametrize(("source", "code", "kind"), CASES[:2])
def test_a_commit_that_they_run_out_under_is_offered_again(
    source: str, code: str, kind: type[DeltasyncError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(source, tmp_path, monkeypatch)
    keys.give("OLD")
    model = Zoo()
    optimizer = adamw(model)
    with running_world(code) as world, attach(model, optimizer, world.store) as publisher:
        train(model, optimizer, 1)
        world.front.last = "versions/"
        with pytest.raises(CommitUnknown) as caught:
            publisher.publish(1).result()
        assert code in str(caught.value)
        assert isinstance(caught.value.__cause__, kind)
        keys.give("NEW")
        world.front.valid = "NEW"
        train(model, optimizer, 2)
        commit = publisher.publish(2).result()
        assert commit is not None
        assert (commit.version, commit.manifest.optimizer_steps) == (2, 1)
        assert_identical(publisher, model, world.store, 2)
        assert verify_stream(world.store).ok


def test_a_publisher_process_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys("file", tmp_path, monkeypatch)
    keys.give("OLD")
    model, config, report = Zoo(), write_config(tmp_path), Report(StoreMetrics())
    optimizer = adamw(model)
    with (
        running_world("ExpiredToken") as world,
        sidecar_thread(config, world.store, report),
        Publisher.attach(optimizer, model, config) as publisher,
    ):
        train(model, optimizer, 1)
        world.front.valid = "NEW"
        with pytest.raises(CredentialsExpired) as caught:
            publisher.publish(1).result(WAIT)
        assert caught.value.hint
        error = report.status().last_error
        assert error is not None
        assert error.kind == "credentials_expired"
        keys.give("NEW")
        train(model, optimizer, 2)
        commit = publisher.publish(2).result(WAIT)
        assert commit is not None
        assert_identical(publisher, model, world.store, 1)
        until(lambda: report.status().last_error is None)
