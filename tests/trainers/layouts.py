"""How torch spreads a policy over ranks: each layout as its users write it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from publisher.group import Writer

LR, DECAY = 2e-5, 0.1


State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """`policy`: which. `spread`: makes of it, in place, what is trained. `optimizer`: of that.

    `config`: of the publisher. `same_data`: so many neighbouring ranks train on the same batches.

    `everyone`: all ranks publish; else only the first. `dtype`: of the parameters. `serves`: the policy that rollouts
    have, if it is another, and `truth`: what that is, from the trainer's model and its gathered weights.
    """

    policy: str
    spread: Callable[[nn.Module, int], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer] = lambda model: AdamW(
        model.parameters(), lr=LR, weight_decay=DECAY
    )
    world_size: int = 2
    everyone: bool = True
    writer: Callable[[], Writer | None] = lambda: None
    dtype: torch.dtype = torch.float32
    config: dict[str, Any] | None = None
    same_data: int = 1
    serves: str | None = None
    truth: Callable[[nn.Module, State], State] = lambda model, state: state


def ddp(policy: nn.Module, world_size: int) -> nn.Module:
    return DistributedDataParallel(policy)


def zero(model: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=AdamW, lr=LR, weight_decay=DECAY, parameters_as_bucket_view=True
    )


def fsdp(policy: nn.Module, world_size: int) -> nn.Module:
    """fp32 parameters, bf16 compute."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(policy, mesh=init_device_mesh("cpu", (world_size,)), mp_policy=mixed)


def fsdp_plain(policy: nn.Module, world_size: int) -> nn.Module:
    return sharded(policy, mesh=init_device_mesh("cpu", (world_size,)))


def columns(policy: nn.Module, world_size: int) -> nn.Module:
    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % world_size == 0 else None

    return sharded(policy, mesh=init_device_mesh("cpu", (world_size,)), shard_placement_fn=placement)


def hybrid(policy: nn.Module, world_size: int) -> nn.Module:
    return sharded(
        policy, mesh=init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    )


def tensor_parallel(policy: nn.Module, world_size: int) -> nn.Module:
    """FSDP over rows of two tensor-parallel halves; what the plan does not name, FSDP shards in each half alike."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    for layer in layers(policy):
        parallelize_module(
            layer,
            mesh["tp"],
            {
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            },
        )
    return sharded(policy, mesh=mesh["dp"])


def sharded(policy: nn.Module, **options: Any) -> nn.Module:
    for layer in layers(policy):
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    return policy


def layers(policy: nn.Module) -> list[nn.Module]:
    return [module for module in policy.modules() if type(module).__name__.endswith("DecoderLayer")]


def single_tensor(model: nn.Module) -> Optimizer:
    """The kernel that takes parameters of different meshes."""
    return AdamW(model.parameters(), lr=LR, weight_decay=DECAY, foreach=False)


@torch.no_grad()
def clip(model: nn.Module, limit: float) -> None:
    """What clip_grad_norm_ does, also for parameters of different meshes."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [g.norm().full_tensor() if isinstance(g, DTensor) else g.norm() for g in grads]
    scale = (limit / (torch.stack([n.float() for n in norms]).norm() + 1e-6)).clamp(max=1.0).item()
    for grad in grads:
        grad.mul_(scale)


def merged(model: Any, state: State) -> State:
    """What PEFT makes of the model, in a copy."""
    whole: State = deepcopy(model.module).merge_and_unload().state_dict()
    return whole


ADAPTER = {"lora": "adapter"}
MERGED: dict[str, Any] = {"config": {"lora": "merged"}, "serves": "base", "truth": merged}

LAYOUTS = {
    "DDP, the first rank": Layout("even", ddp, everyone=False),
    "DDP, every rank a share": Layout("odd", ddp, writer=Writer.of_process_group),
    "ZeroRedundancyOptimizer": Layout("even", ddp, zero),
    "FSDP2, bf16 compute": Layout("even", fsdp),
    "FSDP2, uneven and empty shards": Layout("odd", fsdp_plain),
    "FSDP2, bf16 parameters": Layout("even", fsdp_plain, dtype=torch.bfloat16, config={"detect": "snapshot"}),
    "FSDP2, columns": Layout("even", columns),
    "HSDP": Layout("odd", hybrid, world_size=4),
    "LoRA, DDP": Layout("lora", ddp, writer=Writer.of_process_group, config=ADAPTER),
    "LoRA, ZeroRedundancyOptimizer": Layout("lora", ddp, zero, config=ADAPTER),
    "LoRA merged, DDP": Layout("lora", ddp, writer=Writer.of_process_group, **MERGED),
    "LoRA merged, ZeroRedundancyOptimizer": Layout("lora", ddp, zero, **MERGED),
    "LoRA, FSDP2": Layout("lora", fsdp, config=ADAPTER),
    "FSDP2 × TP": Layout("llama", tensor_parallel, single_tensor, world_size=4, same_data=2),
}
