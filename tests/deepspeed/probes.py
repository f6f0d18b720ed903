"""Two ranks that try what has to be refused, or only explained; each writes down what it was told."""

from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import distributed, nn
from torch.optim import AdamW

import deltasync
from publisher.adapters import deepspeed as adapter
from tests.deepspeed.layouts import BF16, CPU, LAYOUTS, SAME_DTYPE, Layout, zero
from tests.deepspeed.trainer import Trainer
from tests.trainers.layouts import LR
from tests.trainers.probes import ask

CONFIG = {"inference_dtype": "bfloat16", "writers_timeout": 60.0}


class Experts(nn.Module):
    """Two experts on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=2)


class Probes:
    """One method per probe; what it returns is shown, and so is what it raises."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self._trainer = Trainer(LAYOUTS["ZeRO-1"])

    def attach(self, optimizer: Any, model: Any, **options: Any) -> str:
        url, config = str(self.folder / "nobody-writes-here"), options.pop("config", {})
        config = {"store": {"url": url}, **CONFIG, **config}
        deltasync.Publisher.attach(optimizer, model, config, **options).close()
        return "attached"

    def _again(self, **options: Any) -> str:
        return self.attach(self._trainer.optimizer, self._trainer.engine, **options)

    def shifted(self) -> str:
        """Rank 1 looks for its parameters one element further on."""
        right = adapter._offset
        with mock.patch.object(adapter, "_offset", lambda *args: right(*args) + self.rank):
            return self._again()

    @torch.no_grad()
    def master_alone(self) -> str:
        """Rank 1's masters are not those of its parameters."""
        for master in self._trainer.optimizer.single_partition_of_fp32_groups:
            master.add_(self.rank)
        try:
            return self._again()
        finally:
            for master in self._trainer.optimizer.single_partition_of_fp32_groups:
                master.sub_(self.rank)
            self._trainer.optimizer.refresh_fp32_params()

    @torch.no_grad()
    def drifted(self) -> str:
        """Rank 1 has other values for what rank 0 steps."""
        weight = self._trainer.engine.module.model.model.embed_tokens.weight
        before = weight.clone()
        weight[0, 0] += self.rank
        try:
            return self._again()
        finally:
            weight.copy_(before)

    def elsewhere(self) -> str:
        """A parameter was given other memory on rank 1."""
        bias = self._trainer.engine.module.bias
        home = bias.data
        if self.rank:
            bias.data = bias.data.clone()
        try:
            return self._again()
        finally:
            bias.data = home

    def spool(self) -> str:
        return self._again(config={"spool": "/dev/shm/nowhere"})

    def lora(self) -> str:
        return self._again(config={"lora": "adapter"})

    def masters(self) -> str:
        bias = self._trainer.engine.module.bias
        return self._again(masters=[(bias, bias)])

    def another_model(self) -> str:
        return self.attach(self._trainer.optimizer, nn.Linear(3, 3))

    def some_of_the_ranks(self) -> str:
        groups = [distributed.new_group([rank]) for rank in range(2)]
        return self._again(writer=deltasync.Writer.of_process_group(group=groups[self.rank]))

    def inner_optimizer(self) -> str:
        return self.attach(self._trainer.optimizer.optimizer, self._trainer.engine)

    def module_alone(self) -> str:
        return str(deltasync.explain(self._trainer.optimizer, self._trainer.engine.module))

    def stage_0_of_16_bits(self) -> str:
        trainer = Trainer(Layout("", BF16 | SAME_DTYPE | zero(0)))
        return self.attach(trainer.optimizer, trainer.engine)

    def stage_0_of_32_bits(self) -> str:
        trainer = Trainer(Layout("", zero(0)))
        return deltasync.explain(trainer.optimizer, trainer.engine).kind

    def zenflow(self) -> str:
        flow = {
            "topk_ratio": 0.1,
            "select_strategy": "step",
            "select_interval": 4,
            "update_interval": 4,
            "overlap_step": False,
        }
        adam = {"optimizer": {"type": "AdamW", "params": {"lr": LR}}}
        config = BF16 | adam | zero(2, zenflow=flow, **CPU)
        trainer = Trainer(Layout("", config, optimizer=lambda model: None))
        return self.attach(trainer.optimizer, trainer.engine)

    def experts(self) -> str:
        model = Experts()
        groups: Any = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=AdamW(groups), config=Layout("", BF16 | SAME_DTYPE | zero(1)).settings
        )
        return self.attach(optimizer, engine)

    def pipeline(self) -> str:
        """The last: DeepSpeed keeps its process groups."""
        layers = PipelineModule([nn.Linear(8, 8), nn.Linear(8, 8)], num_stages=2, loss_fn=nn.MSELoss())
        engine, optimizer, _, _ = deepspeed.initialize(
            model=layers,
            optimizer=AdamW(layers.parameters()),
            config=Layout("", BF16 | SAME_DTYPE | zero(1)).settings,
        )
        return self.attach(optimizer, engine)


def main(rank: int, folder: str, meeting: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    ask(Probes(rank, Path(folder)))
