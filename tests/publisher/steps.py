"""Real AdamW steps on one parameter, with the truth about its inference bits kept beside."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Adam, AdamW, Optimizer

from manifest.catalog import TensorSpec
from publisher.capture import CaptureStats, capture_steps
from publisher.optimizers import step_records
from publisher.shard import Shard, Source

KERNELS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "maximize": {"foreach": False, "maximize": True},
    "amsgrad": {"foreach": False, "amsgrad": True},
}


@dataclass
class Trainee:
    """One fp32 parameter, its optimizer, and its shard."""

    parameter: torch.nn.Parameter
    optimizer: Optimizer
    shard: Shard
    stats: CaptureStats
    generator: torch.Generator

    def bits(self) -> npt.NDArray[np.uint16]:
        return self.parameter.detach().to(self.shard.wire).view(torch.int16).numpy().view(np.uint16).copy()

    def step(self, *, gradient: bool = True) -> None:
        """One optimizer step on random gradients, then the capture that the hook would do."""
        self.parameter.grad = None
        if gradient:
            scale = 10.0 ** torch.randint(-5, 1, (1,), generator=self.generator)
            self.parameter.grad = torch.randn(self.parameter.shape, generator=self.generator) * scale
        self.optimizer.step()
        self.capture()

    def capture(self) -> None:
        records = step_records(self.optimizer, {id(self.parameter)})
        with ThreadPoolExecutor(2) as threads:
            capture_steps(((self.shard, record) for _, record in records), self.stats, threads)

    def found(self) -> dict[int, int]:
        changes = self.shard.changes
        return dict(zip(changes.offsets.tolist(), changes.old.tolist(), strict=True))


def trainee(
    numel: int = 100_000,
    *,
    kernel: str = "single",
    wire: str = "BF16",
    adam: bool = False,
    seed: int = 0,
    start: int = 0,
    **hyper: Any,
) -> Trainee:
    """A parameter drawn as trained weights are (σ 0.02), with a few zeros and large values.

    It holds the elements from `start` on of the canonical tensor `w`, which ends with it.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 0.02
    values[:8] = torch.tensor([0.0, -0.0, 3.0e4, -1.0, 1e-3, -2.0, 65504.0, 0.5])[: min(8, numel)]
    parameter = torch.nn.Parameter(values)
    optimizer = (Adam if adam else AdamW)([parameter], **KERNELS[kernel], **hyper)
    shard = Shard(0, TensorSpec("w", wire, (start + numel,)), parameter, Source.INVERSION, start)
    return Trainee(parameter, optimizer, shard, CaptureStats(), generator)


def truth(before: npt.NDArray[np.uint16], after: npt.NDArray[np.uint16]) -> dict[int, int]:
    """Changed offsets and their old bits."""
    where = np.flatnonzero(before != after)
    return dict(zip(where.tolist(), before[where].tolist(), strict=True))


def grid() -> Iterator[tuple[str, float, float, tuple[float, float]]]:
    for kernel in ("single", "foreach", "fused"):
        for lr in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
            for weight_decay in (0.0, 0.1):
                yield kernel, lr, weight_decay, ((0.9, 0.95) if lr < 1e-5 else (0.9, 0.999))
