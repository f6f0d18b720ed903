"""Capture on real AdamW: the change set is exactly the true one, and what cannot be proved goes whole."""

import copy

import numpy as np
import pytest
import torch

from publisher.capture import capture_snapshot
from publisher.inversion import bits16, reconstruct
from publisher.optimizers import step_records
from publisher.shard import Shard, Source
from tests.publisher.steps import Trainee, grid, trainee, truth


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """16-bit floats as integers that sort as the numbers do, −0 below +0."""
    wide = bits.to(torch.int32)
    return torch.where(wide < 0, -(wide & 0x7FFF) - 1, wide)


@pytest.mark.parametrize(("kernel", "lr", "weight_decay", "betas"), list(grid()))
def test_guard_band_holds_the_old_bits(
    kernel: str, lr: float, weight_decay: float, betas: tuple[float, float]
) -> None:
    it = trainee(50_000, kernel=kernel, lr=lr, weight_decay=weight_decay, betas=betas)
    for _ in range(4):
        before = it.parameter.detach().clone()
        it.step()
        ((_, record),) = step_records(it.optimizer, {id(it.parameter)})
        assert record.m is not None
        assert record.v is not None
        found = reconstruct(
            it.parameter.detach(), record.m, record.v, record.step, record.hyper, torch.bfloat16
        )
        old, new = bits16(before, torch.bfloat16), bits16(it.parameter.detach(), torch.bfloat16)
        certain = found.low == found.high
        assert torch.equal(found.low[certain], old[certain])
        assert bool(torch.all(_ordered(found.low) <= _ordered(old)))
        assert bool(torch.all(_ordered(old) <= _ordered(found.high)))
        flagged = (found.low != new) | (found.high != new)
        assert bool(torch.all(flagged[old != new]))


@pytest.mark.parametrize(("kernel", "lr", "weight_decay", "betas"), list(grid()))
def test_many_steps_give_exactly_the_true_changes(
    kernel: str, lr: float, weight_decay: float, betas: tuple[float, float]
) -> None:
    it = trainee(kernel=kernel, lr=lr, weight_decay=weight_decay, betas=betas)
    base = it.bits()
    for _ in range(5):
        it.step()
    _assert_complete(it, base)
    assert it.stats.unproved_blocks == 0
    if lr <= 1e-6:
        assert not it.shard.changes.whole.any()


@pytest.mark.parametrize("kernel", ["maximize", "amsgrad"])
@pytest.mark.parametrize("wire", ["BF16", "F16"])
@pytest.mark.parametrize("adam", [False, True])
def test_other_variants_are_proved_too(kernel: str, wire: str, adam: bool) -> None:
    it = trainee(kernel=kernel, wire=wire, adam=adam, lr=1e-5, weight_decay=0.01)
    base = it.bits()
    for _ in range(4):
        it.step()
    _assert_complete(it, base)
    assert it.stats.unproved_blocks == 0


def test_skipped_steps_and_changing_hyper_parameters() -> None:
    """FIELD_REPORTS: AReaL dte: the learning rate is the one used in the step, read before a scheduler rewrites it."""
    it = trainee(lr=1e-6, weight_decay=0.1)
    base = it.bits()
    for lr, decay, gradient in (
        (1e-6, 0.1, True),
        (5e-5, 0.0, True),
        (1e-6, 0.1, False),
        (0.0, 0.1, True),
        (2e-6, 0.3, True),
    ):
        it.optimizer.param_groups[0].update(lr=lr, weight_decay=decay)
        it.step(gradient=gradient)
        it.optimizer.param_groups[0].update(
            lr=1.0, weight_decay=9.0
        )  # what a scheduler does right after the hook
    _assert_complete(it, base)
    assert it.stats.unproved_blocks == 0


def test_a_step_that_was_not_seen_sends_the_tensor_whole() -> None:
    it = trainee(lr=1e-6)
    it.step()
    it.parameter.grad = torch.ones_like(it.parameter)
    it.optimizer.step()
    it.step()
    assert len(it.shard.changes.whole_blocks) == len(it.shard.kept)


def test_a_rolled_back_step_count_sends_the_tensor_whole() -> None:
    it = trainee(lr=1e-6)
    it.step()
    state = copy.deepcopy(it.optimizer.state_dict())
    it.step()
    it.optimizer.load_state_dict(state)
    it.capture()
    assert len(it.shard.changes.whole_blocks) == len(it.shard.kept)


def test_an_edit_between_steps_is_not_missed() -> None:
    """A clamp, a reload, a swap: the reconstruction cannot have the kept digest, so the block goes whole."""
    it = trainee(lr=1e-6)
    it.step()
    with torch.no_grad():
        it.parameter[40_000] += 1.0
    it.step()
    assert it.stats.unproved_blocks == 1
    assert it.shard.changes.whole_blocks.tolist() == [40_000 // 16384]


def test_a_wrong_learning_rate_in_the_record_is_caught_by_the_proof() -> None:
    it = trainee(lr=1e-4, weight_decay=0.1)
    it.parameter.grad = torch.ones_like(it.parameter)
    it.optimizer.step()
    it.optimizer.param_groups[0]["lr"] = 1e-9
    it.capture()
    assert len(it.shard.changes.whole_blocks) == len(it.shard.kept)


def test_values_that_are_not_finite() -> None:
    it = trainee(lr=1e-4)
    base = it.bits()
    with torch.no_grad():
        it.parameter[100] = float("nan")
        it.parameter[60_000] = float("inf")
    it.step()
    it.step()
    _assert_complete(it, base)


def test_a_value_far_below_the_update_cannot_be_rebuilt_and_goes_whole() -> None:
    """θ_{t−1} = 1e-30 is lost in θ_t = θ_{t−1} − u; only the proof can tell, and it does."""
    it = trainee(lr=1e-6)
    with torch.no_grad():
        it.parameter[20_000] = 1e-30
    base = it.bits()
    it.shard.kept = it.shard.digests()
    it.step()
    assert it.shard.changes.whole_blocks.tolist() == [1]
    _assert_complete(it, base)


@pytest.mark.parametrize("kernel", ["single", "foreach", "fused"])
def test_exact_zeros_are_rebuilt_though_nothing_of_them_is_left(kernel: str) -> None:
    """Dequantized and pruned weights are full of zeros: θ_t = −u, and u is only known up to the kernel's rounding."""
    it = trainee(kernel=kernel, lr=1e-6, weight_decay=0.1)
    with torch.no_grad():
        it.parameter[::7] = 0.0
    it.shard.kept = it.shard.digests()
    base = it.bits()
    it.step()
    assert it.stats.unproved_blocks == 0
    _assert_complete(it, base)


def test_lr_times_decay_of_one_or_more_sends_the_tensor_whole() -> None:
    it = trainee(lr=0.5, weight_decay=0.1)
    it.step()
    it.optimizer.param_groups[0]["weight_decay"] = 2.0
    it.step()
    assert len(it.shard.changes.whole_blocks) == len(it.shard.kept)


def test_snapshot_finds_any_edit_bit_by_bit() -> None:
    """FIELD_REPORTS: grail: comparison is on bits: +0 → −0 is a change, an unchanged NaN is none."""
    it = trainee()
    shard = Shard(0, it.shard.spec, it.parameter, Source.SNAPSHOT)
    with torch.no_grad():
        it.parameter[500] = float("nan")
    capture_snapshot(shard)
    shard.changes = type(shard.changes).empty()
    before = it.bits()
    with torch.no_grad():
        it.parameter[0] = -0.0
        it.parameter[70_000:70_003] += 0.5
    capture_snapshot(shard)
    assert dict(zip(shard.changes.offsets.tolist(), shard.changes.old.tolist(), strict=True)) == truth(
        before, it.bits()
    )
    assert shard.changes.offsets.tolist() == [0, 70_000, 70_001, 70_002]


def _assert_complete(it: Trainee, base: "np.ndarray[tuple[int], np.dtype[np.uint16]]") -> None:
    """Every true change is in the set with its base bits, or in a whole block; nothing in the set is wrong."""
    found, whole = it.found(), it.shard.changes.whole_blocks.tolist()
    for offset, old in truth(base, it.bits()).items():
        assert offset // 16384 in whole or found.get(offset) == old
    assert all(base[offset] == old for offset, old in found.items())
