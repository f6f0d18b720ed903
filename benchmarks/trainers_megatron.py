"""Megatron-Core, for `benchmarks.trainers`; against its own dist_checkpointing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

import deltasync
from benchmarks.trainers import LR, shape
from tests.megatron import training
from tests.megatron.models import Layout, begin, cpu

from megatron.core import dist_checkpointing  # isort: skip  # after its preparation for the CPU

_LAYOUTS = {"Megatron-Core, DP 2": Layout(2)}
NAMES = tuple(_LAYOUTS)


def ranks(name: str) -> int:
    return _LAYOUTS[name].world_size


class MegatronTrainer:
    """One rank of the tests' trainer. It saves bf16 weights."""

    def __init__(self, layout: Layout, base: Path) -> None:
        training.LR = LR
        self._trainer = training.Trainer(layout, base)
        self.stepping = [one.optimizer for one in self._trainer.optimizer.chained_optimizers]

    def attach(self, stream: Path) -> deltasync.Publisher:
        """See `Trainer`."""
        return self._trainer.attach(stream)

    def step(self) -> None:
        """See `Trainer`."""
        assert self._trainer.step()

    def save(self, folder: Path) -> None:
        """See `Trainer`."""
        folder.mkdir(parents=True, exist_ok=True)
        distributed.barrier()
        weights: dict[str, Any] = {}
        for chunk in self._trainer.chunks:
            model: Any = chunk.gpt
            weights |= model.sharded_state_dict()
        dist_checkpointing.save(weights, str(folder))


@contextmanager
def trainer(name: str, parameters: int, folder: Path) -> Iterator[MegatronTrainer]:
    """See `Framework`."""
    base, layout = folder / "base", _LAYOUTS[name]
    if distributed.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**shape(parameters))).bfloat16().save_pretrained(base)
    distributed.barrier()
    with cpu.on_cpu():
        begin(layout)
        yield MegatronTrainer(layout, base)
