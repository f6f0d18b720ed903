"""DeepSpeed's ZeRO, for `benchmarks.trainers`; against its own save_16bit_model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
from torch import distributed
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

import deltasync
from benchmarks.trainers import LR, SHAPE, shape
from tests.deepspeed.layouts import BF16, Layout, groups, zero
from tests.trainers.policies import Policy

import tests.deepspeed.trainer  # noqa: F401  isort: skip  # it keeps DeepSpeed from compiling

_STAGES = {"DeepSpeed ZeRO-1": 1, "DeepSpeed ZeRO-2": 2, "DeepSpeed ZeRO-3": 3}
NAMES = tuple(_STAGES)


def ranks(name: str) -> int:
    return 2


class DeepSpeedTrainer:
    """One rank. It saves bf16 weights."""

    def __init__(self, stage: int, parameters: int) -> None:
        rank = distributed.get_rank()
        os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(distributed.get_world_size()))
        sharding = zero(stage, stage3_gather_16bit_weights_on_model_save=True)
        layout = Layout("", BF16 | sharding, accumulate=1)
        torch.manual_seed(0)
        model = Policy(LlamaForCausalLM(LlamaConfig(**shape(parameters))))
        torch.manual_seed(1 + rank)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=AdamW(groups(model), lr=LR), config=layout.settings
        )
        self.stepping = [self.optimizer.optimizer]

    def attach(self, stream: Path) -> deltasync.Publisher:
        """See `Trainer`."""
        config = {"store": {"url": str(stream)}, "inference_dtype": "bfloat16"}
        return deltasync.Publisher.attach(self.optimizer, self.engine, config)

    def step(self) -> None:
        """See `Trainer`."""
        loss = self.engine(torch.randint(0, SHAPE["vocab_size"], (4, 64)))
        self.engine.backward(loss)
        self.engine.step()

    def save(self, folder: Path) -> None:
        """See `Trainer`."""
        self.engine.save_16bit_model(str(folder), "pytorch_model.bin")


@contextmanager
def trainer(name: str, parameters: int, folder: Path) -> Iterator[DeepSpeedTrainer]:
    """See `Framework`."""
    yield DeepSpeedTrainer(_STAGES[name], parameters)
