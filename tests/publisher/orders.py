"""AdamW as the kernels in use really compute it, and what the inversion finds of each kernel's steps.

torch's own CPU kernels are run; the others are restated from their sources, operation by operation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch.optim import AdamW

from manifest.catalog import TensorSpec
from publisher import find
from publisher.changes import BLOCK, ChangeSet, Flags
from publisher.inversion import Hyper, Reconstruction, reconstruct
from publisher.optimizers import StepRecord, step_records
from publisher.shard import PIECE, Shard, Source

EPS: Final = 1e-8


@dataclass
class Weights:
    """One parameter with its moments and its steps so far; fp32, one shape."""

    theta: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    step: int = 0


Order = Callable[[Weights, torch.Tensor, Hyper], None]
"""One step, in place, on the given gradient; `weights.step` already counts it."""


def torch_order(**kernel: Any) -> Order:
    """torch.optim.AdamW itself."""

    def step(w: Weights, gradient: torch.Tensor, hyper: Hyper) -> None:
        parameter = torch.nn.Parameter(w.theta)
        optimizer = AdamW(
            [parameter],
            lr=hyper.lr,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            **kernel,
        )
        optimizer.state[parameter] = {
            "step": torch.tensor(float(w.step - 1)),
            "exp_avg": w.m,
            "exp_avg_sq": w.v,
        }
        parameter.grad = gradient
        optimizer.step()
        ((_, record),) = step_records(optimizer, {id(parameter)})
        assert (record.step, record.hyper) == (w.step, hyper)

    return step


def torch_capturable(w: Weights, gradient: torch.Tensor, hyper: Hyper) -> None:
    """torch with capturable=True, which runs on no CPU: the step is a tensor, its size folded into the denominator."""
    _moments(w, gradient, hyper)
    step = torch.tensor(float(w.step))
    w.theta.mul_(1 - hyper.lr * hyper.weight_decay)
    size = (hyper.lr / (1 - hyper.beta1**step)).neg()
    correction = (1 - hyper.beta2**step).sqrt()
    w.theta.addcdiv_(w.m, (w.v.sqrt() / (correction * size)).add_(hyper.eps / size))


def torch_cuda_fused(w: Weights, gradient: torch.Tensor, hyper: Hyper) -> None:
    """torch's fused CUDA kernel: products with lr and betas in double, each rounded once; step size in float."""
    b1, b2 = hyper.beta1, hyper.beta2
    wide = gradient.double()
    w.theta.copy_(w.theta.double() - hyper.lr * hyper.weight_decay * w.theta.double())
    w.m.copy_(b1 * w.m.double() + (1 - b1) * wide)
    w.v.copy_(b2 * w.v.double() + (1 - b2) * wide * wide)
    size = _f32(hyper.lr / float(_f32(1 - b1**w.step)))
    correction = _f32(1 - b2**w.step).sqrt()
    denominator = ((w.v.sqrt() / correction).double() + hyper.eps).float()
    w.theta.sub_(size * w.m / denominator)


def apex(*, fma: bool) -> Order:
    """FusedAdam of Apex and Transformer Engine: float betas, and a decay that is not rounded apart."""

    def step(w: Weights, gradient: torch.Tensor, hyper: Hyper) -> None:
        b1, b2, decay, lr = _f32(hyper.beta1), _f32(hyper.beta2), _f32(hyper.weight_decay), _f32(hyper.lr)
        w.m.copy_(_add(b1, w.m, (1 - b1) * gradient, fma=fma))
        w.v.copy_(_add(b2, w.v, (1 - b2) * gradient * gradient, fma=fma))
        mean = w.m / _f32(1 - float(b1) ** w.step)
        update = mean / ((w.v / _f32(1 - float(b2) ** w.step)).sqrt() + _f32(hyper.eps))
        update = _add(decay, w.theta, update, fma=fma)
        w.theta.copy_(_add(-lr, update, w.theta, fma=fma))

    return step


def deepspeed_cpu(w: Weights, gradient: torch.Tensor, hyper: Hyper) -> None:
    """DeepSpeedCPUAdam: float βᵗ, multiplied up step by step; every product and sum fused."""
    b1, b2 = _f32(hyper.beta1), _f32(hyper.beta2)
    w.m.copy_(_add(b1, w.m, (1 - b1) * gradient, fma=True))
    w.v.copy_(_add(b2, w.v, (1 - b2) * (gradient * gradient), fma=True))
    power1, power2 = _f32(1.0), _f32(1.0)
    for _ in range(w.step):
        power1, power2 = power1 * b1, power2 * b2
    correction1, correction2 = 1 - power1, 1 / (1 - power2).sqrt()
    update = w.m / _add(w.v.sqrt(), correction2, _f32(hyper.eps), fma=True)
    w.theta.copy_(_add(_f32(-hyper.lr * hyper.weight_decay), w.theta, w.theta, fma=True))
    w.theta.copy_(_add(-_f32(hyper.lr) / correction1, update, w.theta, fma=True))


ORDERS: Final[dict[str, Order]] = {
    "torch single": torch_order(foreach=False),
    "torch foreach": torch_order(foreach=True),
    "torch CPU fused": torch_order(fused=True),
    "torch capturable": torch_capturable,
    "torch CUDA fused": torch_cuda_fused,
    "Apex, TE": apex(fma=False),
    "Apex, TE with FMA": apex(fma=True),
    "DeepSpeedCPUAdam": deepspeed_cpu,
}


def _f32(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def _add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, fma: bool) -> torch.Tensor:
    """a·b + c, rounded once (up to fp64's own rounding of the sum) or twice."""
    return (a.double() * b.double() + c.double()).float() if fma else a * b + c


def _moments(w: Weights, gradient: torch.Tensor, hyper: Hyper) -> None:
    w.m.lerp_(gradient, 1 - hyper.beta1)
    w.v.mul_(hyper.beta2).addcmul_(gradient, gradient, value=1 - hyper.beta2)


@dataclass
class Tally:
    """What was found over `steps` element-steps, `changed` of which changed the bf16 value.

    `missed`: changed, and not found. `extra`: found, and not changed. `wrong`: elements of proved blocks whose old bits
    are not the true ones. `unproved`: blocks sent whole; `unproved_sparse`: those of them with so few changes that they
    would otherwise be sent element by element. `blind_missed` and `blind_caught`: missed without the guard,
    and those of them in blocks that the proof refused.
    """

    steps: int = 0
    changed: int = 0
    missed: int = 0
    extra: int = 0
    wrong: int = 0
    blocks: int = 0
    unproved: int = 0
    unproved_sparse: int = 0
    blind_missed: int = 0
    blind_caught: int = 0

    def add(self, shard: Shard, record: StepRecord, old: torch.Tensor) -> None:
        """Count one step. `old`: int16 bits before it, flat; `shard.kept` holds their digests."""
        shard.changes = ChangeSet.empty()  # no block is to be skipped
        digests = []
        for start in range(0, shard.spec.numel, PIECE):
            stop = min(start + PIECE, shard.spec.numel)
            digests.append(self._piece(shard, record, old[start:stop], start, stop))
        shard.kept = np.concatenate(digests)

    def _piece(
        self, shard: Shard, record: StepRecord, old: torch.Tensor, start: int, stop: int
    ) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
        before = old.numpy().view(np.uint16)
        now = shard.bits(shard.tensor[start:stop]).numpy().view(np.uint16)
        changed = before != now
        found = find.find(shard, record, start, stop)
        proved = found.prove(shard.fingerprint)
        flagged = np.zeros_like(changed)
        flagged[found.local] = True
        trusted = proved[found.block]
        self.steps += stop - start
        self.changed += int(changed.sum())
        self.missed += int((changed & ~flagged).sum())
        self.extra += int((flagged & ~changed).sum())
        self.wrong += int((found.old != before[found.local])[trusted].sum())
        self.blocks += len(proved)
        self.unproved += int((~proved).sum())
        per_block = np.bincount(np.flatnonzero(changed) // BLOCK, minlength=len(proved))
        self.unproved_sparse += int((~proved & (per_block <= BLOCK // 3)).sum())
        self._blind(shard, record, changed, start, stop)
        return found.digests

    def _blind(self, shard: Shard, record: StepRecord, changed: Flags, start: int, stop: int) -> None:
        with mock.patch.object(find, "reconstruct", _without_guard):
            found = find.find_reference(shard, record, start, stop)
        missed = changed.copy()
        missed[found.local] = False
        proved = found.prove(shard.fingerprint)
        where = np.flatnonzero(missed)
        self.blind_missed += len(where)
        self.blind_caught += int((~proved[where // BLOCK]).sum())


def _without_guard(*args: Any) -> Reconstruction:
    guess = reconstruct(*args).guess
    return Reconstruction(guess, guess, guess)


def hypers(learning_rates: tuple[float, ...]) -> Iterator[Hyper]:
    for lr in learning_rates:
        for weight_decay in (0.0, 0.01, 0.1):
            for beta2 in (0.95, 0.999):
                yield Hyper(lr, 0.9, beta2, EPS, weight_decay)


def tally(order: Order, hyper: Hyper, numel: int, steps: int, seed: int) -> Tally:
    """Run `steps` steps from fresh moments on `numel` weights drawn as trained ones are, a few of them zero."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(numel, generator=generator) * 0.02
    theta[:64] = 0.0
    weights = Weights(theta, torch.zeros(numel), torch.zeros(numel))
    shard = Shard(0, TensorSpec("w", "BF16", (numel,)), theta, Source.INVERSION)
    counts = Tally()
    for _ in range(steps):
        scale = 10.0 ** float(torch.empty(()).uniform_(-5, 0, generator=generator))
        old = shard.bits(theta).clone()
        weights.step += 1
        order(weights, torch.randn(numel, generator=generator) * scale, hyper)
        counts.add(shard, StepRecord(weights.step, hyper, weights.m, weights.v), old)
    return counts
