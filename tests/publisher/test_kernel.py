"""The compiled kernel against the torch reference: the same digests, the same elements, the same bits."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifest.catalog import TensorSpec
from publisher.changes import BLOCK, ChangeSet
from publisher.find import compare_compiled, compare_reference, find_compiled, find_reference
from publisher.optimizers import StepRecord, step_records
from publisher.shard import Shard, Source
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
    it.shard.changes = ChangeSet.empty()  # no block is to be skipped
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


@given(
    st.integers(0, 2**32 - 1),
    st.integers(-40, 10),
    st.integers(-44, 38),
    st.sampled_from([0.0, 1e-15, 1e-8, 1.0]),
)
@settings(deadline=None, max_examples=60)
def test_same_with_moments_of_any_size(seed: int, m_exponent: int, v_exponent: int, eps: float) -> None:
    """Squares that under- and overflow, zeros, signs of all kinds: what the wide pass may not be fooled by."""
    numel = 40_000
    it = _stepped(numel, lr=1e-4, weight_decay=0.01, eps=eps)
    rng = np.random.default_rng(seed)
    state = it.optimizer.state[it.parameter]
    spread = torch.from_numpy(10.0 ** rng.uniform(-6, 0, numel)).float()
    state["exp_avg"].copy_(torch.randn(numel, generator=it.generator) * spread * 10.0**m_exponent)
    state["exp_avg_sq"].copy_(spread.square().double() * 10.0**v_exponent)
    for moment in state["exp_avg"], state["exp_avg_sq"]:
        moment[torch.from_numpy(rng.random(numel) < 0.1)] = 0.0
    found, expected = (
        find_compiled(it.shard, _record(it), 0, numel),
        find_reference(it.shard, _record(it), 0, numel),
    )
    if found is None:
        u = state["exp_avg"].abs() / (state["exp_avg_sq"].sqrt() + eps)
        assert not u.max() < 1e30
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
    it = _stepped(50_000, lr=1e-5)
    it.optimizer.state[it.parameter]["exp_avg"][49_999] = 0.0
    it.optimizer.state[it.parameter]["exp_avg_sq"][49_999] = -1e-30
    assert find_compiled(it.shard, _record(it), 0, 50_000) is None


def test_same_where_the_second_moment_overflows_without_its_bias() -> None:
    it = _stepped(50_000, lr=1e-4)
    state = it.optimizer.state[it.parameter]
    state["exp_avg"].copy_(torch.randn(50_000, generator=it.generator) * 5e18)
    state["exp_avg_sq"].fill_(1e37)
    found = find_compiled(it.shard, _record(it), 0, 50_000)
    expected = find_reference(it.shard, _record(it), 0, 50_000)
    assert found is not None
    assert len(expected.local) > 1000
    for field in FIELDS:
        assert np.array_equal(getattr(found, field), getattr(expected, field)), field


@given(
    st.integers(1, 70_000), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-4, 0.01, 1.0]), st.booleans()
)
@settings(deadline=None, max_examples=60)
def test_comparison_with_a_master_is_the_same_as_the_reference(
    numel: int, seed: int, share: float, reloaded: bool
) -> None:
    """Any bits, blocks that are skipped, unchanged or not what they were after the step before."""
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 1 << 16, numel, dtype=np.uint16)
    changed = rng.random(numel) < share
    after = before ^ (rng.integers(1, 1 << 16, numel, dtype=np.uint16) * changed)
    old, new = (torch.from_numpy(bits.view(np.int16)) for bits in (before, after))
    start = 2 * BLOCK
    live = torch.cat([torch.zeros(start, dtype=torch.bfloat16), old.view(torch.bfloat16)])
    shard = Shard(0, TensorSpec("w", "BF16", (len(live),)), live, Source.COPY)
    whole = np.flatnonzero(rng.random(len(shard.kept)) < 0.2)
    shard.changes.add_whole(whole, shard.kept[whole])
    if reloaded:
        shard.kept[-1] += np.uint64(1)
    found, expected = (f(shard, new, old, start) for f in (compare_compiled, compare_reference))
    for field in FIELDS:
        assert np.array_equal(getattr(found, field), getattr(expected, field)), field
    assert share < 1.0 or shard.changes.is_whole(2, len(shard.kept) - 2).all() or len(found.local) > 0
