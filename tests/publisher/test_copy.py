"""Mixed precision: 16-bit parameters, fp32 masters in the optimizer, copied back after its step."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from chunkstore.errors import ConfigError
from publisher.errors import OptimizerRefused
from publisher.publisher import Publisher
from tests.publisher.zoo import assert_identical, fresh_store, live


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(150, 300)
        self.down = nn.Linear(300, 150)
        self.register_buffer("offset", torch.zeros(5))
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.down(torch.relu(self.up(x))).float().square().mean()
        return loss


class MixedPrecision:
    """What Megatron's and DeepSpeed's optimizers do: step the masters, then refresh the parameters."""

    def __init__(self, model: nn.Module, inner: Callable[[list[torch.Tensor]], Optimizer]) -> None:
        self.model = model
        self.masters = [p.detach().float() for p in model.parameters()]
        self.inner = inner(self.masters)

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.model.parameters(), self.masters, strict=True))

    def step(self, *, refresh: bool = True) -> None:
        self.model.zero_grad()
        dtype = next(self.model.parameters()).dtype
        torch.autograd.backward(self.model(torch.randn(8, 150, dtype=dtype)))
        for parameter, master in self.pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.float().nan_to_num(1e-3)
        self.inner.step()
        if refresh:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        for parameter, master in self.pairs:
            parameter.copy_(master)


def adamw(lr: float = 1e-5, **kernel: Any) -> Callable[[list[torch.Tensor]], Optimizer]:
    return lambda masters: AdamW(masters, lr=lr, weight_decay=0.1, **kernel)


def attach(optimizer: MixedPrecision, store: Any, **config: Any) -> Publisher:
    return Publisher.attach(
        optimizer.inner,
        optimizer.model,
        {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16", **config},
        masters=optimizer.pairs,
        store=store,
    )


INNER = {
    "single": adamw(foreach=False),
    "foreach": adamw(foreach=True),
    "fused": adamw(fused=True),
    "large steps": adamw(lr=1e-3),
    "not Adam": lambda masters: SGD(masters, lr=1e-4, momentum=0.9),
}


@pytest.mark.parametrize("inner", list(INNER))
def test_exactly_what_changed_is_found_for_any_number_of_steps(inner: str) -> None:
    model, store = Policy(), fresh_store()
    optimizer = MixedPrecision(model, INNER[inner])
    with attach(optimizer, store) as publisher:
        for version, steps in enumerate((1, 3, 8), start=1):
            before = live(publisher, model)
            for _ in range(steps):
                optimizer.step()
            commit = publisher.publish().result()
            assert commit is not None
            assert_identical(publisher, model, store, version)
            stats, after = commit.manifest.stats, live(publisher, model)
            assert stats.sources == {"copy": 150 * 300 * 2 + 450, "digest": 5}
            assert stats.unproved_blocks == 0
            assert stats.ambiguous == 0
            if "dense" not in stats.bytes_by_encoding:
                assert stats.changed == sum(int(np.count_nonzero(before[n] != after[n])) for n in before)
    assert inner == "large steps" or "delta" in stats.bytes_by_encoding


def test_fp16_parameters() -> None:
    model, store = Policy().half(), fresh_store()
    optimizer = MixedPrecision(model, adamw())
    with attach(optimizer, store, inference_dtype="float16") as publisher:
        for version in range(1, 4):
            optimizer.step()
            commit = publisher.publish().result()
            assert commit is not None
            assert commit.manifest.stats.unproved_blocks == 0
            assert_identical(publisher, model, store, version)


def test_a_checkpoint_loaded_between_steps_is_caught_by_the_proof() -> None:
    """Master and copy go back together: the comparison alone would find nothing but the step."""
    model, store = Policy(), fresh_store()
    optimizer = MixedPrecision(model, adamw())
    optimizer.step()
    saved = copy.deepcopy((optimizer.masters, optimizer.inner.state_dict()))
    with attach(optimizer, store) as publisher:
        for _ in range(5):
            optimizer.step()
        with torch.no_grad():
            for master, old in zip(optimizer.masters, saved[0], strict=True):
                master.copy_(old)
        optimizer.inner.load_state_dict(saved[1])
        optimizer.refresh()
        optimizer.step()
        commit = publisher.publish().result()
        assert commit is not None
        assert commit.manifest.stats.unproved_blocks > 0
        assert_identical(publisher, model, store, 1)


@torch.no_grad()
def _edit_master(it: MixedPrecision) -> None:
    it.masters[0][5, 5] += 1


@torch.no_grad()
def _edit_parameter(it: MixedPrecision) -> None:
    next(it.model.parameters())[5, 5] = float("nan")


@torch.no_grad()
def _edit_both(it: MixedPrecision) -> None:
    it.masters[0][100:] *= 0.5
    it.refresh()


@torch.no_grad()
def _not_finite(it: MixedPrecision) -> None:
    it.masters[0].view(torch.int32)[0, 0] = 0x7FA12345
    it.masters[0][1, 0] = float("-inf")


@torch.no_grad()
def _round_otherwise(it: MixedPrecision) -> None:
    """As a stochastic rounding would: the copy is not the nearest value."""
    next(it.model.parameters()).view(torch.int16)[:50] += 1


@pytest.mark.parametrize(
    "sabotage", [_edit_master, _edit_parameter, _edit_both, _not_finite, _round_otherwise]
)
@pytest.mark.parametrize("after_last_step", [False, True])
def test_whatever_is_done_to_master_or_copy(
    sabotage: Callable[[MixedPrecision], None], after_last_step: bool
) -> None:
    model, store = Policy(), fresh_store()
    optimizer = MixedPrecision(model, adamw(lr=1e-6))
    with attach(optimizer, store) as publisher:
        for version in range(1, 4):
            optimizer.step()
            sabotage(optimizer)
            if not after_last_step:
                optimizer.step()
            commit = publisher.publish().result()
            assert commit is not None
            assert_identical(publisher, model, store, version)


def test_a_refresh_that_comes_early_or_late_is_published_as_it_is() -> None:
    model, store = Policy(), fresh_store()
    optimizer = MixedPrecision(model, adamw())
    early = optimizer.inner.register_step_post_hook(lambda *_: optimizer.refresh())
    with attach(optimizer, store) as publisher:
        optimizer.step()
        assert publisher.publish().result() is not None
        assert_identical(publisher, model, store, 1)
        early.remove()
        optimizer.step()
        optimizer.step(refresh=False)
        assert publisher.publish().result() is not None
        assert_identical(publisher, model, store, 2)
        optimizer.step()
        assert publisher.publish().result() is not None
        assert_identical(publisher, model, store, 3)


def test_snapshot_is_taken_if_asked_for() -> None:
    model, store = Policy(), fresh_store()
    optimizer = MixedPrecision(model, adamw())
    with attach(optimizer, store, detect="snapshot") as publisher:
        optimizer.step()
        commit = publisher.publish().result()
        assert commit is not None
        assert set(commit.manifest.stats.sources) == {"snapshot", "digest"}
        assert_identical(publisher, model, store, 1)


@pytest.mark.parametrize(
    ("masters", "reason"),
    [
        (lambda p, m: [(m, m)], r"a parameter of shape \(300, 150\) is not in the model"),
        (lambda p, m: [(p, m.clone())], r"the master of up\.weight is in no optimizer"),
    ],
)
def test_masters_that_do_not_fit_are_refused(masters: Callable[..., Any], reason: str) -> None:
    model = Policy()
    optimizer = MixedPrecision(model, adamw())
    config = {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16"}
    pairs = masters(model.up.weight, optimizer.masters[0])
    with pytest.raises(OptimizerRefused, match=reason):
        Publisher.attach(optimizer.inner, model, config, masters=pairs, store=fresh_store())


def test_a_master_of_another_shape_or_beside_its_own_parameter_is_refused() -> None:
    model = Policy()
    config = {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16"}
    flat = torch.zeros(300 * 150)
    weight = model.up.weight
    with pytest.raises(
        OptimizerRefused, match=r"the master of up\.weight is torch\.float32 \(45000,\), not floats of"
    ):
        Publisher.attach(AdamW([flat]), model, config, masters=[(weight, flat)], store=fresh_store())
    with pytest.raises(OptimizerRefused, match=r"up\.weight is in the optimizer itself"):
        Publisher.attach(AdamW([weight, flat]), model, config, masters=[(weight, flat)], store=fresh_store())


def test_masters_cannot_be_shared_with_a_publisher_process() -> None:
    optimizer = MixedPrecision(Policy(), adamw())
    with pytest.raises(ConfigError, match=r"4 masters were given, but with `spool`.*leave `spool` out"):
        attach(optimizer, None, spool="/dev/shm/nowhere")
