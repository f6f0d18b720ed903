"""The race check of the conformance suite is able to fail: plain moto, which checks and then puts, lets both win."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.s3.models import S3Backend

from chunkstore.open import StoreConfig
from deltasync.s3server import BUCKET, EmbeddedS3Server
from tests.support.race import race

KEYS = ["versions/0", "versions/1"]


@pytest.fixture
def waiting_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold every put, once its check has passed, until a second one has come as far; for at most 0.3 seconds."""
    together = threading.Semaphore(0), threading.Semaphore(0)
    turn = iter(range(1_000_000))
    real = S3Backend.put_object

    def put_object(self: S3Backend, *args: Any, **kwargs: Any) -> Any:
        mine = next(turn) % 2
        together[1 - mine].release()
        together[mine].acquire(timeout=0.3)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(S3Backend, "put_object", put_object)


@pytest.fixture
def plain_moto(s3_server: EmbeddedS3Server) -> Iterator[str]:
    """The endpoint of moto as it is; it shares its buckets with `s3_server`, both being in this process."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def config(endpoint: str, prefix: str) -> StoreConfig:
    return StoreConfig(url=f"s3://{BUCKET}/{prefix}", endpoint_url=endpoint, path_style=True)


@pytest.mark.usefixtures("waiting_puts")
def test_the_race_catches_a_server_that_checks_and_then_puts(plain_moto: str) -> None:
    raced = race(config(plain_moto, "unlocked"), KEYS)
    assert [one.won for one in raced] == [(True, True)] * len(KEYS)
    assert not any(one.fair for one in raced)


@pytest.mark.usefixtures("waiting_puts")
def test_one_request_at_a_time_makes_the_same_server_fair(s3_server: EmbeddedS3Server) -> None:
    raced = race(config(s3_server.url, "locked"), KEYS)
    assert all(one.fair for one in raced)
