"""Undo one AdamW step: from θ_t and the optimizer state to bounds on the inference bits before the step.

The forward step (torch.optim.AdamW, single and foreach, Loshchilov & Hutter 2019):
    p ← θ_{t−1} · fl32(1 − lr·wd);  θ_t = p − u,  u = (lr/(1−β1^t)) · m / (√v/√(1−β2^t) + eps)
so θ̂ = (θ_t + u) / fl32(1 − lr·wd). Kernels round differently; the guard R bounds what they can differ by.
"""

import math
from dataclasses import dataclass

import torch

ROUNDING = 2.0**-21
"""Of |u|: what kernels that round in different places may differ by."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """What one parameter's step used. `weight_decay` is 0 for coupled L2, which never multiplies θ."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @property
    def decay(self) -> float:
        """1 − lr·wd as the kernels multiply by it: rounded to fp32."""
        return float(torch.tensor(1.0 - self.lr * self.weight_decay, dtype=torch.float32))

    @property
    def invertible(self) -> bool:
        """False where the step destroyed θ_{t−1}: lr·wd ≥ 1, or values that are not finite."""
        return math.isfinite(self.lr) and math.isfinite(self.decay) and self.decay > 0.0


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """What is known of the inference bits before the step; each int16, one entry per element.

    `guess`: the bits of θ̂. `low`, `high`: the bits of θ̂−R and θ̂+R. The old value is certain where low == high.
    """

    guess: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def bits16(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """The 16-bit patterns of `values` rounded to `wire`, as int16 (round to nearest, ties to even)."""
    return values.to(wire).view(torch.int16)


def reconstruct(
    theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: int, hyper: Hyper, wire: torch.dtype
) -> Reconstruction:
    """Bounds on the bits before step `step` (1-based). θ, m, v: fp32, one shape, any device.

    R = (1.5·(ulp32(θ_t) + ulp32(θ̂)) + 2⁻¹³·|u|) / (1−lr·wd). Since θ_{t−1} is an fp32 number inside θ̂ ± R and
    rounding is monotone, its bits lie between `low` and `high`. An element that is not finite anywhere gets
    low ≠ high. `hyper.invertible` must hold and step ≥ 1.
    """
    u = _update(m, v, step, hyper)
    decay = hyper.decay
    wide = theta.double()
    old = (wide + u.double()) / decay
    # Weights are often exactly zero (padding, pruning, dequantized files), hardly ever within rounding error of it.
    old = torch.where(old.abs() < u.double().abs() * ROUNDING, 0.0, old)
    radius = 1.5 * (_ulp32(theta) + _ulp32(old.float())) + u.double().abs() * 2.0**-13
    radius = radius / decay
    low = bits16((old - radius).float(), wire)
    high = bits16((old + radius).float(), wire)
    # A non-finite bound may round to equal bits on both sides (NaN, inf): make it uncertain, never equal.
    broken = ~(torch.isfinite(old) & torch.isfinite(radius))
    high = torch.where(broken, ~low, high)
    return Reconstruction(bits16(old.float(), wire), low, high)


def _update(m: torch.Tensor, v: torch.Tensor, step: int, hyper: Hyper) -> torch.Tensor:
    """u in fp32, with the forward's own operations in the forward's own order, so that it rounds the same."""
    correction1 = 1.0 - hyper.beta1**step
    correction2 = math.sqrt(1.0 - hyper.beta2**step)
    denominator = (v.sqrt() / correction2).add_(hyper.eps)
    return torch.addcdiv(torch.zeros_like(m), m, denominator, value=hyper.lr / correction1)


def _ulp32(x: torch.Tensor) -> torch.Tensor:
    """Unit in the last place of fp32 `x`, as fp64: 2^(exponent − 23), the smallest normal's below 2⁻¹²⁶."""
    exponent = (x.view(torch.int32) & 0x7F800000).clamp_min(1 << 23)
    return exponent.view(torch.float32).double() * 2.0**-23
