"""A version that nobody can apply never stops the fleet: a real trainer, real subscribers, objects that are lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from chunkstore.memory import MemoryStore
from chunkstore.open import StoreConfig
from manifest.log import VersionLog, open_stream
from publisher.publisher import Publisher
from subscriber.config import SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.torch_engine import TorchEngine
from tests.subscriber.parts import TIMEOUT, running, until


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 20))


class Trainer:
    """A real model and optimizer, published into the store of this name."""

    def __init__(self, name: str, **config: Any) -> None:
        self.store = MemoryStore.named(name)
        self.model = network()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-5)
        settings = {"store": {"url": f"memory://{name}"}, "inference_dtype": "bfloat16"} | config
        self.publisher = Publisher.attach(self.optimizer, self.model, settings)
        self.publisher._feed._refusals._interval = 0.0  # type: ignore[attr-defined]
        self.log = VersionLog(self.store, open_stream(self.store))

    def publish(self) -> int:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        commit = self.publisher.publish().result(TIMEOUT)
        assert commit is not None
        return commit.version

    def is_what(self, module: nn.Module) -> bool:
        live = module.state_dict()
        return all(torch.equal(live[k], v.to(torch.bfloat16)) for k, v in self.model.state_dict().items())


def worker(tmp_path: Path, name: str, identity: str) -> Subscriber:
    config = SubscriberConfig(
        store=StoreConfig(url=f"memory://{name}"),
        id=identity,
        poll_interval=0.02,
        status_interval=0.1,
        state_dir=tmp_path / "state",
        http=None,
    )
    return Subscriber(config, TorchEngine(network().to(torch.bfloat16), boot_id="boot"))


@pytest.mark.parametrize("cold", [False, True], ids=["serving", "cold"])
def test_a_lost_object_is_answered_with_an_anchor(cold: bool, tmp_path: Path) -> None:
    name = f"refused-{cold}-{tmp_path.name}"
    trainer = Trainer(name)
    first, second = (worker(tmp_path, name, identity) for identity in ("first", "second"))
    with trainer.publisher, running(first):
        first.wait_for(0, TIMEOUT)
        # Lost before anybody could read it; nobody has what comes before it either, if cold.
        lost = Lossy(trainer, cold)
        with running(second):
            version = trainer.publish()
            until(lambda: version in refused(first))
            while not trainer.log.alternates():
                trainer.publish()
            newest = trainer.publisher.version
            first.wait_for(newest, TIMEOUT)
            second.wait_for(newest, TIMEOUT)
            assert lost.gone
            for subscriber in (first, second):
                assert isinstance(subscriber.engine, TorchEngine)
                assert trainer.is_what(subscriber.engine.module)
                until(lambda subscriber=subscriber: refused(subscriber) == [])  # type: ignore[misc]


def refused(subscriber: Subscriber) -> list[int]:
    return [refusal.version for refusal in subscriber.report.status().refused]


class Lossy:
    """From now on the store loses the chunks of the next version, and those of version 0 if `cold`."""

    def __init__(self, trainer: Trainer, cold: bool) -> None:
        self.gone: list[str] = []
        store, put = trainer.store, trainer.store.put
        lost = trainer.publisher.version + 1

        def losing(key: str, data: Any) -> None:
            if key.startswith(f"chunks/{lost:020d}/"):
                self.gone.append(key)
            else:
                put(key, data)

        store.put = losing  # type: ignore[method-assign]
        if cold:
            for ref in trainer.log.read_required(0).chunks:
                store.delete(ref.key)
