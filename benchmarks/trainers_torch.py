"""torch's own trainers, for `benchmarks.trainers`; against torch.distributed.checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import deltasync
from benchmarks.trainers import LR, SHAPE, shape
from tests.trainers import layouts
from tests.trainers.layouts import LAYOUTS
from tests.trainers.policies import Policy

NAMES = (
    "DDP, the first rank",
    "DDP, every rank a share",
    "ZeroRedundancyOptimizer",
    "FSDP2, bf16 compute",
    "FSDP2, columns",
    "HSDP",
    "FSDP2 × TP",
)


def ranks(name: str) -> int:
    return LAYOUTS[name].world_size


class TorchTrainer:
    """One rank of a layout of the tests."""

    def __init__(self, name: str, parameters: int) -> None:
        layouts.LR = LR
        self.layout = LAYOUTS[name]
        rank = distributed.get_rank()
        torch.manual_seed(0)
        policy = Policy(LlamaForCausalLM(LlamaConfig(**shape(parameters))))
        torch.manual_seed(1 + rank // self.layout.same_data)
        self.model = self.layout.spread(policy, self.layout.world_size)
        self.optimizer = self.layout.optimizer(self.model)
        self.stepping = [getattr(self.optimizer, "optim", self.optimizer)]

    def attach(self, stream: Path) -> deltasync.Publisher | None:
        """See `Trainer`."""
        if not self.layout.everyone and distributed.get_rank():
            return None
        config = {
            "store": {"url": str(stream)},
            "inference_dtype": "bfloat16",
            **(self.layout.config or {}),
        }
        return deltasync.Publisher.attach(self.optimizer, self.model, config, writer=self.layout.writer())

    def step(self) -> None:
        """See `Trainer`."""
        self.optimizer.zero_grad()
        self.model(torch.randint(0, SHAPE["vocab_size"], (4, 64))).backward()
        layouts.clip(self.model, 1.0)
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        """See `Trainer`."""
        state_dict_saver.save({"model": get_model_state_dict(self.model)}, checkpoint_id=folder)


@contextmanager
def trainer(name: str, parameters: int, folder: Path) -> Iterator[TorchTrainer]:
    """See `Framework`."""
    yield TorchTrainer(name, parameters)
