"""The compiled kernel against the torch reference: the same digests, the same elements, the same bits."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from publisher.changes import ChangeSet
from publisher.find import find_compiled, find_reference
from publisher.optimizers import StepRecord, step_records
from tests.publisher.steps import Trainee, trainee

FIELDS = ("digests", "missing", "local", "new", "old", "low", "high")


@pytest.fixture(autouse=True)
def _correctly_rounded_square_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fp32 sqrt on the CPU is off by an ulp now and then; the kernel's is not. All else must be equal."""
    theirs = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda v: theirs(v.double()).to(v.dtype))


def _record(it: Trainee) -> StepRecord:
    ((_, record),) = step_records(it.optimizer, {id(it.parameter)})
    return record


def _stepped(numel: int, **hyper: Any) -> Trainee:
    it = trainee(numel, **hyper)
    it.step()
    it.shard.changes = ChangeSet.empty(it.shard.kept)  # no block is to be skipped
    it.parameter.grad = torch.randn(numel, generator=it.generator) * 1e-3
    it.optimizer.step()
    return it


@pytest.mark.parametrize("kernel", ["single", "fused"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-7, 1e-6, 1e-4, 1e-2])
def test_same_as_the_reference(kernel: str, weight_decay: float, lr: float) -> None:
    it = _stepped(200_000, kernel=kernel, lr=lr, weight_decay=weight_decay)
    found, expected = (
        find_compiled(it.shard, _record(it), 0, 200_000),
        find_reference(it.shard, _record(it), 0, 200_000),
    )
    assert found is not None
    assert len(expected.local) > 0
    for field in FIELDS:
        assert np.array_equal(getattr(found, field), getattr(expected, field)), field


def test_same_where_the_decay_is_far_from_one() -> None:
    it = _stepped(100_000, lr=0.3, weight_decay=1.2)
    found, expected = (
        find_compiled(it.shard, _record(it), 0, 100_000),
        find_reference(it.shard, _record(it), 0, 100_000),
    )
    assert found is not None
    for field in FIELDS:
        assert np.array_equal(getattr(found, field), getattr(expected, field)), field


@given(st.integers(1, 40_000), st.integers(0, 2**32 - 1), st.integers(-45, 38))
@settings(deadline=None, max_examples=60)
def test_same_on_any_bit_patterns(numel: int, seed: int, exponent: int) -> None:
    """Subnormal and huge weights, moments of any size: the two never differ, unless the kernel declines."""
    it = _stepped(numel, lr=1e-5, weight_decay=0.01)
    rng = np.random.default_rng(seed)
    state = it.optimizer.state[it.parameter]
    with torch.no_grad():
        it.parameter.copy_(torch.from_numpy(rng.integers(0, 2**32, numel, dtype=np.uint32).view(np.float32)))
        if exponent < 30:
            it.parameter.nan_to_num_(1.0, 1.0, 1.0)
        state["exp_avg"].mul_(10.0**exponent)
    found, expected = (
        find_compiled(it.shard, _record(it), 0, numel),
        find_reference(it.shard, _record(it), 0, numel),
    )
    if found is None:
        assert exponent > 20 or not torch.isfinite(it.parameter * it.parameter).all()
        return
    for field in FIELDS:
        assert np.array_equal(getattr(found, field), getattr(expected, field)), field


def test_declines_what_is_not_finite() -> None:
    it = _stepped(50_000, lr=1e-5)
    with torch.no_grad():
        it.parameter[17_000] = float("nan")
    assert find_compiled(it.shard, _record(it), 0, 50_000) is None
    it = _stepped(50_000, lr=1e-5)
    it.optimizer.state[it.parameter]["exp_avg"][49_999] = float("inf")
    assert find_compiled(it.shard, _record(it), 0, 50_000) is None
