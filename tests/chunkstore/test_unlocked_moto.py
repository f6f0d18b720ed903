"""The race check of the conformance suite is able to fail: plain moto, which checks and then puts, lets both win."""

import pytest

from chunkstore.open import StoreConfig
from deltasync.s3server import BUCKET, EmbeddedS3Server
from tests.support.race import race

KEYS = ["versions/0", "versions/1"]


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
