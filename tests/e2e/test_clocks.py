"""Clocks that are hours off, each way, and that jump: nothing depends on them but what people are shown."""

import random
import threading
import time
from pathlib import Path

import pytest
import torch

from chunkstore.posix import PosixStore
from deltasync.overview import overview
from manifest.collect import delete_garbage, read_holdings
from manifest.gc import Policy, collectable
from manifest.keys import status_key
from manifest.log import VersionLog, open_stream
from manifest.verify import verify_stream
from publisher.compact import compact
from publisher.errors import WriterMissing
from subscriber.config import SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.torch_engine import TorchEngine
from tests.publisher.ranks import Crew, outcomes
from tests.publisher.zoo import Zoo, adamw, attach, published, train
from tests.subscriber.parts import TIMEOUT, live_bits, running, until
from tests.support.crashes import age, assert_nothing_leaks

HOURS = 5 * 3600.0
_now = time.time


class Clocks:
    """Seconds by which the subscriber's machine and everybody else's differ from the store's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.subscriber = self.others = 0.0
        monkeypatch.setattr("time.time", self.time)

    def time(self) -> float:
        name = threading.current_thread().name
        ours = name.startswith(("deltasync-subscriber", "deltasync-work"))
        return _now() + (self.subscriber if ours else self.others)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


class World:
    """A publisher and a subscriber of one stream on a file system."""

    def __init__(self, folder: Path) -> None:
        self.store = PosixStore(folder / "store")
        self.model = Zoo()
        self.optimizer = adamw(self.model, lr=1e-4)
        self.rollout = Zoo().to(torch.bfloat16)
        self.subscriber = Subscriber(
            SubscriberConfig.model_validate(
                {"store": {"url": str(folder / "store")}, "id": "s", "state_dir": folder / "state", "http": None,
                 "poll_interval": 0.02, "status_interval": 0.2}
            ),
            TorchEngine(self.rollout),
        )  # fmt: skip

    def holds(self, version: int) -> bool:
        live = self.rollout.state_dict()
        wanted = published(self.store, version)
        return all((live_bits(live[name]).ravel() == bits).all() for name, bits in wanted.items())


@pytest.mark.parametrize("here", [-HOURS, 0.0, HOURS])
@pytest.mark.parametrize("there", [-HOURS, HOURS])
def test_two_machines_that_disagree(here: float, there: float, clocks: Clocks, tmp_path: Path) -> None:
    """`here`: the subscriber's; `there`: the publisher's, and of whoever compacts, collects, asks for the status."""
    clocks.subscriber, clocks.others = here, there
    world = World(tmp_path)
    with (
        attach(world.model, world.optimizer, world.store) as publisher,
        running(world.subscriber) as subscriber,
    ):
        subscriber.wait_for(0, TIMEOUT)
        for step in range(1, 4):
            until(lambda: not subscriber.report.lag()[0])
            train(world.model, world.optimizer, step)
            commit = publisher.publish(step).result()
            assert commit is not None
            until(lambda version=commit.version: subscriber.version == version)  # type: ignore[misc]
            assert max(applied.seconds["detect"] for applied in subscriber.report.timeline()[1:]) < TIMEOUT
            assert subscriber.report.lag()[1] < TIMEOUT
        assert world.holds(3)
        log = VersionLog(world.store, open_stream(world.store))
        compact(log, 2, 3600.0)
        policy = Policy(3600.0)
        assert collectable(read_holdings(log, policy), policy).objects == ()
        (row,) = overview(world.store, _now() + min(there, 0.0)).subscribers
        assert not row.silent
        assert row.silent_seconds < TIMEOUT
    assert_nothing_leaks(tmp_path / "store")


def test_the_lag_that_status_shows_is_the_stores(clocks: Clocks, tmp_path: Path) -> None:
    """A subscriber that died is silent, and its lag counted, whatever its own or the publisher's clock said."""
    clocks.subscriber, clocks.others = HOURS, -HOURS
    world = World(tmp_path)
    with attach(world.model, world.optimizer, world.store) as publisher:
        with running(world.subscriber) as subscriber:
            subscriber.wait_for(0, TIMEOUT)
            until(lambda: world.store.head(status_key("s")) is not None)
            alive = world.store.get(status_key("s"), limit=1 << 20)
        train(world.model, world.optimizer, 1)
        publisher.publish(1).result()
    world.store.put(status_key("s"), alive)
    age(tmp_path / "store", 600)
    (row,) = overview(world.store, _now()).subscribers
    assert row.silent
    assert 600 <= row.silent_seconds < 600 + TIMEOUT
    assert 600 <= (row.lag_seconds or 0) < 600 + TIMEOUT


@pytest.mark.parametrize("jump", [-HOURS, HOURS])
def test_the_stores_clock_jumps(jump: float, clocks: Clocks, tmp_path: Path) -> None:
    """All that is there looks hours older, or younger than now: within the grace period nothing is collected."""
    world = World(tmp_path)
    with (
        attach(world.model, world.optimizer, world.store) as publisher,
        running(world.subscriber) as subscriber,
    ):
        for step in range(1, 3):
            train(world.model, world.optimizer, step)
            publisher.publish(step, anchor=True).result()
        subscriber.wait_for(2, TIMEOUT)
        age(tmp_path / "store", jump)
        log, policy = VersionLog(world.store, open_stream(world.store)), Policy(HOURS + 3600)
        garbage = collectable(read_holdings(log, policy), policy).objects
        delete_garbage(world.store, garbage)
        assert garbage == ()
        train(world.model, world.optimizer, 3)
        publisher.publish(3).result()
        subscriber.wait_for(3, TIMEOUT)
        assert world.holds(3)
    assert verify_stream(world.store).ok


def test_writers_whose_clocks_show_any_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They meet, wait for each other, give up and go on, over clocks of which no two looks agree."""
    chance = random.Random(1)
    monkeypatch.setattr("time.time", lambda: _now() + chance.uniform(-HOURS, HOURS))
    store = PosixStore(tmp_path / "store")
    with Crew(2).attach(store, writers_timeout=0.5) as crew:
        crew.step(1)
        assert crew.commit(1).version == 1
        crew.step(2)
        told = outcomes([Crew.publishing(p, 2 + rank) for rank, p in enumerate(crew.publishers)])
        assert [type(error) for error in told] == [WriterMissing, WriterMissing]
        assert crew.commit(4).version == 2
        crew.assert_published(store, 2)
    monkeypatch.undo()
    assert_nothing_leaks(tmp_path / "store")
