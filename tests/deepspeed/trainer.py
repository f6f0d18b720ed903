"""A policy that DeepSpeed trains, on one of the ranks of torch.distributed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import distributed
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.deepspeed.layouts import Layout
from tests.trainers.policies import policy

# On a CPU DeepSpeed would compile, for a minute, a kernel for communication in inference.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# It refuses fp16 where the CPU has no instructions for it. torch computes in fp16 on every CPU, and tests run on any.
get_accelerator().is_fp16_supported = lambda: True


class Trainer:
    """`engine`, `optimizer`: as deepspeed.initialize returns them. `weights`: to begin with. Collective."""

    def __init__(self, layout: Layout, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        self.layout = layout
        rank = distributed.get_rank()
        os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(distributed.get_world_size()))
        with layout.construct(layout.settings):
            model = policy(layout.policy, seed=0)
        if weights is not None:
            with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
                model.load_state_dict(weights)
        layout.prepare(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=layout.optimizer(model),
            model_parameters=trained,  # where the configuration has the optimizer
            config=layout.settings,
            lr_scheduler=_schedule,
        )
        self._batches = torch.Generator().manual_seed(1000 + rank)

    def step(self, *, skipped: bool = False) -> None:
        """One step of the optimizer. `skipped`: gradients are not finite, and so DeepSpeed skips it."""
        if self.layout.offloads:
            self._lend_the_device()
        before = self.engine.skipped_steps
        for _ in range(self.layout.accumulate):
            loss = self.engine(torch.randint(0, 500, (2, 24), generator=self._batches))
            self.engine.backward(loss * float("inf") if skipped else loss)
            self.engine.step()
        assert self.engine.skipped_steps - before == int(skipped)

    def _lend_the_device(self) -> None:
        """Take the parameters away and bring them back, which on a CPU leaves them where they are."""
        self.engine.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=False)
        cut = hasattr(self.optimizer, "lp_param_buffer")  # as ZeRO-3's are
        for flat in [self.optimizer.lp_param_buffer] if cut else self.optimizer.bit16_groups_flat:
            flat.data = flat.data.clone()
        self.engine.reload_states()

    def state(self, folder: Path) -> dict[str, torch.Tensor] | None:
        """The whole model as DeepSpeed saves it, on the first rank. Collective."""
        self.engine.save_16bit_model(str(folder), "pytorch_model.bin")
        if distributed.get_rank():
            return None
        state: dict[str, Any] = torch.load(folder / "pytorch_model.bin", weights_only=True)
        return state


def _schedule(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step % 4))
