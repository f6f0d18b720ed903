"""Any number of steps per version, under any schedule that a trainer may run: bit-identical."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import AdamW

from publisher.errors import MappingMismatch
from tests.publisher.zoo import assert_identical, attach, fresh_store


class Layers(nn.Module):
    """`late` is in the model from the beginning, but in the optimizer only when it is added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(150, 120)
        self.second = nn.Linear(120, 150)
        self.late = nn.Linear(150, 130)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.late(self.second(torch.relu(self.first(x)))).square().mean()
        return loss


STEPS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-7, 1e-6, 1e-5, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.1, 0.5]),
        "skipped": st.booleans(),
        "without_gradient": st.sets(st.sampled_from(["first.weight", "second.weight", "second.bias"])),
        "zero_gradient": st.booleans(),
        "add_group": st.booleans(),
    }
)
VERSIONS = st.lists(st.lists(STEPS, min_size=1, max_size=8), min_size=1, max_size=4)


@given(VERSIONS, st.sampled_from([{"foreach": False}, {"foreach": True}, {"fused": True}]), st.booleans())
@settings(deadline=None, max_examples=25)
def test_any_schedule(versions: list[list[dict[str, Any]]], kernel: dict[str, Any], decoupled: bool) -> None:
    model, store = Layers(), fresh_store()
    optimizer = AdamW([*model.first.parameters(), *model.second.parameters()], **kernel)
    optimizer.param_groups[0]["decoupled_weight_decay"] = decoupled
    with attach(model, optimizer, store) as publisher:
        expected = 0
        for steps in versions:
            for step in steps:
                _step(model, optimizer, step)
            commit = publisher.publish().result()
            if commit is not None:
                expected += 1
                assert commit.version == expected
            assert_identical(publisher, model, store, expected)


def test_a_scheduler_and_skipped_steps_stay_sparse() -> None:
    """K of 1 … 8: what is captured over all of them goes out as differences against the version before."""
    model, store = Layers(), fresh_store()
    optimizer = AdamW(model.parameters(), lr=2e-6, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    with attach(model, optimizer, store) as publisher:
        for version in range(1, 9):
            for number in range(version):
                _gradients(model)
                if (version + number) % 3:
                    optimizer.step()
                scheduler.step()
            commit = publisher.publish().result()
            assert commit is not None
            assert_identical(publisher, model, store, version)
            stats = commit.manifest.stats
            assert stats.unproved_blocks == 0
            assert stats.bytes_by_encoding["delta"] > stats.bytes_by_encoding.get("dense", 0)


def test_a_tensor_new_to_the_model_is_refused_though_its_group_may_be_added() -> None:
    model = Layers()
    optimizer = AdamW(model.parameters())
    publisher = attach(model, optimizer, fresh_store())
    model.adapter = nn.Linear(3, 3)
    optimizer.add_param_group({"params": list(model.adapter.parameters())})
    model.adapter(torch.ones(3)).sum().backward()
    optimizer.step()
    with pytest.raises(MappingMismatch, match=r"adapter\.weight is new in the model"):
        publisher.publish()
    publisher.close()


def _gradients(model: Layers) -> None:
    model.zero_grad()
    torch.autograd.backward(model.loss(torch.randn(4, 150)))


def _step(model: Layers, optimizer: AdamW, step: dict[str, Any]) -> None:
    if step["add_group"] and len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": list(model.late.parameters()), "lr": step["lr"]})
    _gradients(model)
    for name, parameter in model.named_parameters():
        if name in step["without_gradient"]:
            parameter.grad = None
        elif step["zero_gradient"] and parameter.grad is not None:
            parameter.grad.zero_()
    for group in optimizer.param_groups:
        group.update(lr=step["lr"], weight_decay=step["weight_decay"])
    if not step["skipped"]:
        optimizer.step()
    for group in optimizer.param_groups:
        group.update(lr=1.0, weight_decay=9.0)  # what a scheduler may do right after the hooks
