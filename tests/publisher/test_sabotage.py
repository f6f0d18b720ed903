"""Whatever is done to the weights behind the publisher's back, every version equals them bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim import adam as torch_adam

from chunkstore.errors import StoreUnavailable
from publisher import tracking
from publisher.changes import Bits16, ChangeSet, Offsets
from publisher.errors import OptimizerRefused
from tests.publisher.zoo import adamw, assert_identical, attach, fresh_store
from tests.support.faults import FaultStore


class Twins(nn.Module):
    """Two matrices of one shape, of a few proof blocks each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(200, 300)
        self.b = nn.Linear(200, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.a(x) * self.b(x)).square().mean()
        return loss


@torch.no_grad()
def clamp(model: Twins, optimizer: Optimizer) -> None:
    model.a.weight.clamp_(-0.03, 0.03)


@torch.no_grad()
def edit(model: Twins, optimizer: Optimizer) -> None:
    model.a.weight[7, 11] += 1.0
    model.b.bias[3] = -0.0


@torch.no_grad()
def swap_values(model: Twins, optimizer: Optimizer) -> None:
    kept = model.a.weight.clone()
    model.a.weight.copy_(model.b.weight)
    model.b.weight.copy_(kept)


def swap_memory(model: Twins, optimizer: Optimizer) -> None:
    model.a.weight.data, model.b.weight.data = model.b.weight.data, model.a.weight.data


def swap_with_moments(model: Twins, optimizer: Optimizer) -> None:
    swap_memory(model, optimizer)
    a, b = model.a.weight, model.b.weight
    optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]


@torch.no_grad()
def not_finite(model: Twins, optimizer: Optimizer) -> None:
    model.a.weight[0, 0] = float("nan")
    model.a.weight[100, 5] = float("inf")
    model.b.weight.view(torch.int32)[200, 9] = 0x7FA12345  # a signalling NaN with a payload


@torch.no_grad()
def forge_moments(model: Twins, optimizer: Optimizer) -> None:
    optimizer.state[model.a.weight]["exp_avg"].mul_(3)
    optimizer.state[model.b.weight]["exp_avg_sq"][5] = float("nan")


class Reload:
    """To an earlier checkpoint of weights and optimizer, taken at the first call."""

    def __init__(self) -> None:
        self.saved: tuple[dict[str, Any], dict[str, Any]] | None = None

    def __call__(self, model: Twins, optimizer: Optimizer) -> None:
        if self.saved is None:
            self.saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        model.load_state_dict(self.saved[0])
        optimizer.load_state_dict(self.saved[1])


Sabotage = Callable[[Twins, Optimizer], None]


@pytest.mark.parametrize("after_last_step", [False, True])
@pytest.mark.parametrize(
    "sabotage",
    [clamp, edit, swap_values, swap_memory, swap_with_moments, not_finite, forge_moments, Reload()],
    ids=lambda s: getattr(s, "__name__", "reload"),
)
def test_every_version_is_the_live_model(sabotage: Sabotage, after_last_step: bool) -> None:
    """FIELD_REPORTS: grail: bits are compared, so that −0, NaN and infinities are published as they are."""
    model, store = Twins(), fresh_store()
    optimizer = adamw(model, lr=1e-6)
    with attach(model, optimizer, store) as publisher:
        for version in range(1, 4):
            for step in range(3):
                if not after_last_step and step == 2:
                    sabotage(model, optimizer)
                _train(model, optimizer)
            if after_last_step:
                sabotage(model, optimizer)
            commit = publisher.publish().result()
            assert commit is not None
            assert_identical(publisher, model, store, version)


@pytest.mark.parametrize("wrong", ["decay", "sign", "noise"])
def test_a_kernel_with_a_wrong_formula_is_sent_whole(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is torch's, its step is not: no reconstruction has the kept digest."""
    real = torch_adam.adam

    def adam(params: list[torch.Tensor], *args: Any, lr: float, weight_decay: float, **kwargs: Any) -> None:
        decay = 0.9 if wrong == "decay" else weight_decay
        real(params, *args, lr=-lr if wrong == "sign" else lr, weight_decay=decay, **kwargs)
        if wrong == "noise":
            for parameter in params:
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)

    monkeypatch.setattr(torch_adam, "adam", adam)
    _check_sent_whole()


@pytest.mark.parametrize("wrong", ["forgets", "invents", "lies"])
def test_what_capture_gets_wrong_is_found_before_the_commit(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent has to lead from the base's digests to those of the weights, whoever has made it up."""
    real = ChangeSet.add

    def add(self: ChangeSet, offsets: Offsets, old: Bits16) -> None:
        if wrong == "forgets":
            offsets, old = offsets[1:], old[1:]
        elif wrong == "lies":
            old = old ^ np.uint16(1)
        elif len(offsets):
            old = np.where(offsets == offsets[0], np.uint16(0x3F80), old)
        real(self, offsets, old)

    monkeypatch.setattr(ChangeSet, "add", add)
    _check_sent_whole()


def test_changes_of_a_failed_version_that_were_forgotten_are_found_by_the_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left does not lead from the version before: then everything of the tensor goes."""
    model, inner, failing = Twins(), fresh_store(), [False]
    optimizer = adamw(model, lr=1e-4)

    def fault(operation: str, key: str) -> Exception | None:
        return StoreUnavailable("injected") if failing[0] and key.startswith("chunks/") else None

    monkeypatch.setattr(tracking, "restore", lambda sealed: None)
    with attach(model, optimizer, FaultStore(inner, before=fault)) as publisher:
        _train(model, optimizer)
        failing[0] = True
        with pytest.raises(StoreUnavailable):
            publisher.publish().result()
        failing[0] = False
        commit = publisher.publish().result()
        assert commit is not None
        assert_identical(publisher, model, inner, 1)


def test_a_later_hook_that_edits_is_published() -> None:
    model, store = Twins(), fresh_store()
    optimizer = adamw(model, lr=1e-6)
    with attach(model, optimizer, store) as publisher:
        optimizer.register_step_post_hook(lambda *_: clamp(model, optimizer))
        for version in range(1, 4):
            _train(model, optimizer)
            assert publisher.publish().result() is not None
            assert_identical(publisher, model, store, version)


def test_an_optimizer_with_a_step_of_its_own_is_refused() -> None:
    class Stochastic(AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = Twins()
    with pytest.raises(OptimizerRefused, match=r"a\.bias is stepped by Stochastic.*detect: snapshot"):
        attach(model, Stochastic(model.parameters()), fresh_store())


def _train(model: Twins, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 200)).nan_to_num().backward()
    optimizer.step()


def _check_sent_whole() -> None:
    """Whatever is broken, three versions are identical, for what could not be proved was sent whole."""
    model, store = Twins(), fresh_store()
    optimizer = adamw(model, lr=1e-4)
    with attach(model, optimizer, store) as publisher:
        for version in range(1, 4):
            for _ in range(2):
                _train(model, optimizer)
            commit = publisher.publish().result()
            assert commit is not None
            assert commit.manifest.stats.unproved_blocks > 0
            assert_identical(publisher, model, store, version)
