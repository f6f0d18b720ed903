"""Two publishers of one stream, at once or one after the other: one feeds it, the other is told, nothing is harmed."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from chunkstore.posix import PosixStore
from chunkstore.store import Store
from manifest.errors import Fenced
from publisher.errors import PublisherStopped
from publisher.publisher import Publisher
from subscriber.config import SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.torch_engine import TorchEngine
from tests.publisher.zoo import Zoo, adamw, assert_identical, attach, published, train
from tests.subscriber.parts import TIMEOUT, live_bits, running
from tests.support.crashes import assert_nothing_leaks
from tests.support.faults import FaultStore


class Trainer:
    """A model of its own, and a publisher of it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Zoo()
        self.optimizer = adamw(self.model, lr=1e-4)

    def attach(self, store: Store) -> Publisher:
        return attach(self.model, self.optimizer, store)

    def publish(self, publisher: Publisher, step: int) -> int:
        train(self.model, self.optimizer, step)
        commit = publisher.publish(step).result()
        assert commit is not None
        return commit.version


class Rollout:
    """A subscriber and what it serves."""

    def __init__(self, folder: Path, store: PosixStore) -> None:
        self.store, self.model = store, Zoo().to(torch.bfloat16)
        url = store.url.removeprefix("file://")
        config = SubscriberConfig.model_validate(
            {
                "store": {"url": url},
                "id": "s",
                "state_dir": folder / "state",
                "http": None,
                "poll_interval": 0.02,
            }
        )
        self.subscriber = Subscriber(config, TorchEngine(self.model))

    def reaches(self, version: int) -> None:
        self.subscriber.wait_for(version, TIMEOUT)
        live, wanted = self.model.state_dict(), published(self.store, version)
        assert all((live_bits(live[name]).ravel() == bits).all() for name, bits in wanted.items())


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "store")


@contextmanager
def following(tmp_path: Path, store: PosixStore) -> Iterator[Rollout]:
    rollout = Rollout(tmp_path, store)
    with running(rollout.subscriber):
        yield rollout


@pytest.mark.parametrize("asleep_before", ["chunks/", "versions/"])
def test_a_zombie_that_wakes_when_all_is_over(asleep_before: str, store: PosixStore, tmp_path: Path) -> None:
    """It slept while it published; meanwhile another has taken over, and even what it had uploaded was collected."""
    old, new = Trainer(0), Trainer(1)
    asleep = False

    def sleep(operation: str, key: str) -> None:
        nonlocal asleep
        if asleep and operation.startswith("put") and key.startswith(asleep_before):
            asleep = False
            with new.attach(store) as successor:
                assert new.publish(successor, 1) == 2
                assert new.publish(successor, 2) == 3
            assert_nothing_leaks(tmp_path / "store")

    zombie = old.attach(FaultStore(store, before=sleep))
    asleep = True
    with following(tmp_path, store) as rollout:
        with pytest.raises(
            Fenced, match=r"epoch 1\) lost version 1 .* to publisher [0-9a-f]{32} \(epoch 2\)"
        ) as caught:
            old.publish(zombie, 1)
        assert "only one publisher may feed a stream" in caught.value.hint
        assert "Ranks of one trainer attach on rank 0 only, or all with writer=" in caught.value.hint
        for error in (Fenced, PublisherStopped):
            with pytest.raises(error):
                old.publish(zombie, 2)
        rollout.reaches(3)
    with new.attach(store) as publisher:
        assert_identical(publisher, new.model, store, 4)
    assert_nothing_leaks(tmp_path / "store")


@pytest.mark.parametrize("existing", [False, True])
def test_two_that_start_at_the_same_moment(existing: bool, store: PosixStore, tmp_path: Path) -> None:
    if existing:
        Trainer(0).attach(store).close()
    meeting = threading.Barrier(2, timeout=TIMEOUT)
    told: dict[int, Publisher | Fenced] = {}

    def meet(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.startswith("versions/"):
            meeting.wait()

    def start(number: int) -> None:
        try:
            told[number] = Trainer(number).attach(FaultStore(store, before=meet))
        except Fenced as error:
            told[number] = error

    threads = [threading.Thread(target=start, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    (loser,) = [one for one in told.values() if isinstance(one, Fenced)]
    (winner,) = [one for one in told.values() if isinstance(one, Publisher)]
    assert winner.version == int(existing)
    assert "stop the other one" in loser.hint
    winner.close()
    assert_nothing_leaks(tmp_path / "store")


def test_a_second_trainer_by_mistake_stops_the_first_and_harms_nothing(
    store: PosixStore, tmp_path: Path
) -> None:
    first, second = Trainer(1), Trainer(2)
    with following(tmp_path, store) as rollout, first.attach(store) as one:
        assert first.publish(one, 1) == 1
        rollout.reaches(1)
        with second.attach(store) as other:
            with pytest.raises(Fenced, match="lost version 2"):
                first.publish(one, 2)
            assert second.publish(other, 1) == 3
            rollout.reaches(3)
        with pytest.raises(Fenced):
            one.publish(3)
        with first.attach(store) as again:  # the mistake is stopped, and the first one started anew
            assert again.version == 4
            assert first.publish(again, 3) == 5
            rollout.reaches(5)
            assert_identical(again, first.model, store, 5)
    assert_nothing_leaks(tmp_path / "store")


def test_training_rolled_back_to_an_older_checkpoint_goes_on_upwards(
    store: PosixStore, tmp_path: Path
) -> None:
    """FIELD_REPORTS: marin#1829: versions never go down; the weights of step 1 come again as a new version."""
    trainer = Trainer(0)
    with following(tmp_path, store) as rollout:
        with trainer.attach(store) as publisher:
            trainer.publish(publisher, 1)
            saved = copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()))
            for step in (2, 3):
                trainer.publish(publisher, step)
        rollout.reaches(3)
        trainer.model.load_state_dict(saved[0])
        trainer.optimizer.load_state_dict(saved[1])
        with trainer.attach(store) as publisher:
            commit = publisher.publish(1).result()
            assert commit is not None
            assert (commit.version, commit.manifest.epoch, commit.manifest.train_step) == (5, 2, 1)
            rollout.reaches(5)
            old, new = published(store, 1), published(store, 5)
            assert all((old[name] == new[name]).all() for name in old)
            assert trainer.publish(publisher, 2) == 6
            rollout.reaches(6)
    assert_nothing_leaks(tmp_path / "store")
