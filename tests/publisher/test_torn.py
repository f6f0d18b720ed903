"""Weights that move while they are read: never published, and nothing is lost by it."""

import copy
import random

import numpy as np
import pytest
import torch

from chunkstore.errors import StoreUnavailable
from publisher.adapters.lora import WholeModel
from publisher.adapters.plain import PlainAdapter
from publisher.config import PublisherConfig
from publisher.errors import CaptureLost
from publisher.watch import Watched, plan_watch
from publisher.writer import StreamWriter
from tests.publisher.zoo import Zoo, adamw, fresh_store, published, train
from tests.support.faults import FaultStore


class Torn:
    """A stream writer whose reads can be torn: the weights are changed behind its back, and `still` says so."""

    def __init__(self, detect: str = "auto") -> None:
        self.model = Zoo()
        self.optimizer = adamw(self.model, lr=1e-4)
        self.inner = fresh_store()
        self.tear = False
        self.dark = False
        self.random = random.Random(7)
        config = PublisherConfig.model_validate(
            {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16", "detect": detect}
        )
        adapter = PlainAdapter(self.model, [self.optimizer], selection=WholeModel(self.model))
        self.watched = Watched(adapter, plan_watch(adapter, None, config))
        store = FaultStore(self.inner, before=self._fault)
        self.writer = StreamWriter(store, config, self.watched.catalog, self.watched.shards, self._still)
        self.writer.open(None)

    def _fault(self, operation: str, key: str) -> Exception | None:
        return StoreUnavailable("injected") if self.dark and key.startswith("chunks/") else None

    def _still(self) -> None:
        if self.tear:
            self.move()
            raise CaptureLost("torn by the test")

    def move(self) -> None:
        """A step that nobody captures."""
        with torch.enable_grad():
            train(self.model, self.optimizer, self.random.randrange(1000))

    def step(self) -> None:
        """A step, captured or torn."""
        self.move()
        with torch.no_grad():
            records = list(self.watched.records(self.optimizer))
            if self.tear:
                with pytest.raises(CaptureLost):
                    self.writer.capture(records)
            else:
                self.writer.capture(records)

    def publish(self) -> int | None:
        self.watched.refresh()
        commit = self.writer.publish(None, anchor=False).result(30)
        return None if commit is None else commit.version

    def assert_identical(self, version: int) -> None:
        found = published(self.inner, version)
        for spec in self.watched.catalog.tensors:
            if spec.numel:
                live = self.model.state_dict()[spec.name].reshape(-1)
                live = live.bfloat16().view(torch.uint16) if live.is_floating_point() else live
                assert np.array_equal(found[spec.name], live.numpy().view(found[spec.name].dtype)), spec.name


@pytest.mark.parametrize("detect", ["auto", "snapshot"])
def test_a_torn_version_is_not_committed_and_the_next_is_complete(detect: str) -> None:
    torn = Torn(detect)
    torn.step()
    torn.tear = True
    with pytest.raises(CaptureLost):
        torn.publish()
    torn.tear = False
    assert torn.writer.version == 0
    torn.step()
    assert torn.publish() == 1
    torn.assert_identical(1)
    torn.step()
    assert torn.publish() == 2
    torn.assert_identical(2)


def test_a_torn_capture_sends_what_differs_whole_and_no_more() -> None:
    torn = Torn()
    torn.tear = True
    torn.step()
    torn.tear = False
    torn.step()
    torn.watched.refresh()
    commit = torn.writer.publish(None, anchor=False).result(30)
    assert commit is not None
    sent = {torn.watched.catalog.tensors[s.tensor].name for c in commit.manifest.chunks for s in c.sections}
    assert "inner.weight" in sent
    assert "unused" not in sent
    assert all(s.whole for c in commit.manifest.chunks for s in c.sections)
    torn.assert_identical(1)


@pytest.mark.parametrize("where", ["capture", "publish"])
def test_after_a_torn_read_versions_are_sparse_again(where: str) -> None:
    torn = Torn()
    if where == "publish":
        torn.step()
    torn.tear = True
    if where == "capture":
        torn.step()
    else:
        with pytest.raises(CaptureLost):
            torn.publish()
    torn.tear = False
    torn.step()
    assert torn.publish() == 1
    torn.assert_identical(1)
    torn.step()
    torn.watched.refresh()
    commit = torn.writer.publish(None, anchor=False).result(30)
    assert commit is not None
    assert commit.manifest.stats.unproved_blocks == 0
    assert any(not s.whole for c in commit.manifest.chunks for s in c.sections)
    torn.assert_identical(2)


def test_what_came_back_to_the_base_after_a_torn_capture_is_not_sent() -> None:
    torn = Torn()
    base = copy.deepcopy(torn.model.state_dict())
    torn.tear = True
    torn.step()
    torn.tear = False
    torn.model.load_state_dict(base)
    assert torn.publish() is None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("detect", ["auto", "snapshot"])
def test_any_mixture_of_torn_reads_and_failed_uploads(seed: int, detect: str) -> None:
    """Whatever is committed is what the model was at that publish, and the last version is complete."""
    torn = Torn(detect)
    chance = random.Random(seed)
    for _ in range(12):
        torn.tear, torn.dark = chance.random() < 0.3, False
        for _ in range(chance.randint(0, 2)):
            torn.step()
        torn.tear, torn.dark = chance.random() < 0.25, chance.random() < 0.25
        try:
            version = torn.publish()
        except (CaptureLost, StoreUnavailable):
            continue
        if version is not None:
            torn.assert_identical(version)
    torn.tear = torn.dark = False
    torn.step()
    version = torn.publish()
    assert version is not None
    torn.assert_identical(version)
