"""Optimizers of Megatron-Core that cannot be followed, as it makes them itself; all ranks are told which, and why.

Only Megatron-FSDP is not made here: it needs CUDA. Its flag is set in the configuration of an optimizer instead.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from publisher.errors import OptimizerRefused
from tests.megatron.models import Layout
from tests.megatron.ranks import ranks
from tests.megatron.training import Trainer
from tests.support.tiny_models import save_qwen3

from megatron.core import parallel_state  # isort: skip  # after its preparation for the CPU
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

Make = Callable[[Layout, Path], Trainer]


def offloaded(layout: Layout, base: Path) -> Trainer:
    changes = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": False,
        "pin_cpu_grads": False,
        "pin_cpu_params": False,
    }
    return Trainer(layout, base, changes=changes)


def several_instances(layout: Layout, base: Path) -> Trainer:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    model_parallel_cuda_manual_seed(1234)
    return Trainer(layout, base, changes={"num_distributed_optimizer_instances": 2})


def layer_wise(layout: Layout, base: Path) -> Trainer:
    """What `optimizer="muon"` is wrapped in, here around AdamW."""
    trainer = Trainer(layout, base, changes={"use_distributed_optimizer": False})
    inner = torch.optim.AdamW(p for chunk in trainer.chunks for p in chunk.gpt.parameters())
    groups = ProcessGroupCollection.use_mpu_process_groups()
    trainer.optimizer = LayerWiseDistributedOptimizer([inner], trainer.optimizer.config, groups)
    return trainer


def layer_wise_beside_another(layout: Layout, base: Path) -> Trainer:
    """As Megatron chains it where Adam steps what is no matrix."""
    trainer, matrices = Trainer(layout, base), layer_wise(layout, base).optimizer
    matrices.config = trainer.optimizer.config
    trainer.optimizer = ChainedOptimizer([matrices, trainer.optimizer])
    return trainer


def with_fsdp(layout: Layout, base: Path) -> Trainer:
    trainer = Trainer(layout, base)
    for one in trainer.optimizer.chained_optimizers:
        one.ddp_config.use_megatron_fsdp = True
    return trainer


CASES: dict[str, tuple[Make, str]] = {
    "offloaded": (offloaded, "optimizer_cpu_offload: the step ends after its hooks"),
    "layer_wise": (layer_wise, "LayerWiseDistributedOptimizer: its sharding is not known"),
    "beside": (layer_wise_beside_another, "LayerWiseDistributedOptimizer: its sharding is not known"),
    "fsdp": (with_fsdp, "use_megatron_fsdp: its sharding is not known"),
    "instances": (several_instances, "num_distributed_optimizer_instances > 1: several ranks would publish"),
}


def attach_all(layout: Layout, root: Path, base: Path) -> None:
    one_rank_only(layout, root, base)
    for name, (make, problem) in CASES.items():
        refused(make(layout, base), root / name, problem)


def refused(trainer: Trainer, stream: Path, problem: str) -> None:
    with pytest.raises(OptimizerRefused, match=problem):
        trainer.attach(stream)
    assert not stream.exists()
    distributed.barrier()


def one_rank_only(layout: Layout, root: Path, base: Path) -> None:
    """The other one neither attaches nor waits."""
    trainer, rank = Trainer(layout, base), distributed.get_rank()
    config: Any = trainer.optimizer.chained_optimizers[0].ddp_config
    problem = "use_megatron_fsdp" if rank else "rank 1 refuses: .*use_megatron_fsdp"
    with patch.object(config, "use_megatron_fsdp", bool(rank)):
        refused(trainer, root / "one", problem)


def test_optimizers_that_cannot_be_followed_are_refused_by_name(tmp_path: Path) -> None:
    base = save_qwen3(tmp_path / "base", seed=1)
    with ranks(tmp_path / "meeting", Layout(2), attach_all, tmp_path, base):
        pass
