"""Kinds of trainers, and how to tell which one is given.

In: an optimizer and a model, as the framework made them. Out: shards of canonical tensors with what steps them
(`base.Adapter`). An adapter knows its framework and nothing of versions, stores, or how changes are found.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from chunkstore.errors import ConfigError
from manifest.checkpoint import Checkpoint
from publisher.adapters.base import Adapter, Selection
from publisher.adapters.deepspeed import DeepSpeedAdapter
from publisher.adapters.deepspeed_zero3 import Zero3Adapter
from publisher.adapters.given import GivenAdapter
from publisher.adapters.lora import Lora, check_no_lora, select
from publisher.adapters.megatron import MegatronAdapter
from publisher.adapters.plain import PlainAdapter, data_parallel
from publisher.adapters.ranks import Ranks
from publisher.errors import OptimizerRefused
from publisher.group import Writer


def ranks_of(optimizer: Any, model: Any, writer: Writer | None) -> Ranks:
    """The processes that attach together. To be asked first: what one of them refuses after that, all refuse.

    Those of `writer`; without one the ranks of torch.distributed, who have to ask together, if the model is spread over
    them; else this process alone. Raises ConfigError.
    """
    if writer is not None and (writer.group is not None or writer.owned is not None):
        return Ranks(writer)
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if _is_zero_redundancy(optimizers):
        group = next(o.process_group for o in optimizers if _is_zero_redundancy([o]))
    elif _is_megatron(optimizer) or _is_deepspeed(optimizer) or _has_dtensors(optimizers, model):
        group = None
    else:
        return Ranks(writer)
    if writer is None:
        writer = Writer.of_process_group(group=group)
    return Ranks(replace(writer, group=writer.group or distributed.group.WORLD))


def recognise(
    optimizer: Any,
    model: Any,
    masters: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ranks: Ranks,
    checkpoint: Checkpoint | None,
    lora: Lora | None,
) -> Adapter:
    """The adapter for what is given to `ranks`. `checkpoint`: what the run started from. `lora`: as in publisher.yaml.

    Frameworks that are not imported cannot have made anything, and are not imported here.
    Raises OptimizerRefused, ConfigError, MappingMismatch.
    """
    writer = ranks.writer
    if _is_megatron(optimizer):
        check_no_lora(model, lora, "Megatron-Core's optimizer")
        _check_alone("Megatron-Core", masters, writer)
        return MegatronAdapter(model, optimizer, ranks, checkpoint)
    if _is_deepspeed(optimizer):
        _check_alone("DeepSpeed", masters, writer)
        _check_not_merged(lora, "DeepSpeed cuts parameters among the ranks")
        cut = _any([optimizer], "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
        return (Zero3Adapter if cut else DeepSpeedAdapter)(model, optimizer, ranks, lora)
    optimizers = _torch_optimizers(optimizer)
    selected = partial(select, model, optimizers, masters, lora, checkpoint)
    if writer is not None and writer.owned is not None:
        _check_not_merged(lora, "shards are named by the caller")
        return GivenAdapter(model, optimizers, masters, ranks, selected())
    if _any(model.modules(), "torch.distributed.fsdp", "FullyShardedDataParallel"):
        raise OptimizerRefused(
            "the model is wrapped in FullyShardedDataParallel: its flat parameters do not tell which tensors they hold",
            hint="use fully_shard (FSDP2), or name the shards: deltasync.Owned",
        )
    if _is_zero_redundancy(optimizers):
        return _zero_redundancy(optimizers, model, masters, ranks, selected)
    if _has_dtensors(optimizers, model):
        from publisher.adapters.sharded import ShardedAdapter, reshard

        _check_not_merged(lora, "parameters are DTensors")
        reshard(model)
        return ShardedAdapter(model, optimizers, masters, ranks, selected())
    if writer is None:
        for ddp in data_parallel(model):
            _check_first(ddp.process_group)
    if _any([model], "deepspeed.runtime.engine", "DeepSpeedEngine"):
        if _is_deepspeed(model.optimizer):
            raise OptimizerRefused(
                f"{type(optimizers[0]).__name__} is the optimizer inside DeepSpeed's, which steps masters of its own",
                hint="give the optimizer that deepspeed.initialize returned",
            )
        if writer is None:
            _check_first(model.seq_data_parallel_group)
    return PlainAdapter(model, optimizers, masters, ranks, selection=selected())


def _torch_optimizers(given: Any) -> list[Optimizer]:
    optimizers = [given] if isinstance(given, Optimizer) or not isinstance(given, Iterable) else list(given)
    others = sorted({type(one).__name__ for one in optimizers if not isinstance(one, Optimizer)})
    if others or not optimizers:
        raise OptimizerRefused(
            f"{', '.join(others) or 'nothing'} is given as the optimizer, which is none of torch's",
            hint="give the torch.optim.Optimizer that steps the parameters, or a list of them",
        )
    return optimizers


def _any(things: Iterable[object], module: str, name: str) -> bool:
    """Whether one of `things` is of class `name` of `module`."""
    loaded = sys.modules.get(module)
    return loaded is not None and any(isinstance(thing, getattr(loaded, name)) for thing in things)


def _is_megatron(optimizer: object) -> bool:
    return _any([optimizer], "megatron.core.optimizer.optimizer", "MegatronOptimizer")


def _is_deepspeed(optimizer: object) -> bool:
    return _any([optimizer], "deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer")


def _is_zero_redundancy(optimizers: Iterable[object]) -> bool:
    return _any(optimizers, "torch.distributed.optim", "ZeroRedundancyOptimizer")


def _has_dtensors(optimizers: Iterable[object], model: nn.Module) -> bool:
    groups = (g for o in optimizers if isinstance(o, Optimizer) for g in o.param_groups)
    tensors = chain(model.parameters(), model.buffers(), (p for group in groups for p in group["params"]))
    return _any(tensors, "torch.distributed.tensor", "DTensor")


def _check_alone(framework: str, masters: Sequence[object], writer: Writer | None) -> None:
    if masters or (writer is not None and writer.owned is not None):
        raise OptimizerRefused(
            f"{framework}'s optimizer is given together with masters or owned shards, which it tells by itself",
            hint="give it alone",
        )


def _zero_redundancy(
    optimizers: Sequence[Any],
    model: nn.Module,
    masters: Sequence[object],
    ranks: Ranks,
    selected: Callable[[], Selection],
) -> Adapter:
    from publisher.adapters.zero_redundancy import ZeroRedundancyAdapter

    if len(optimizers) > 1 or masters:
        raise OptimizerRefused(
            "ZeroRedundancyOptimizer is given together with other optimizers or masters", hint="give it alone"
        )
    return ZeroRedundancyAdapter(model, optimizers[0], ranks, selected())


def _check_not_merged(lora: Lora | None, why_not: str) -> None:
    if lora == "merged":
        raise ConfigError(
            f"lora: merged is set, but {why_not}: a merged weight is made of whole tensors",
            hint="`lora: adapter` publishes the adapter, however it is sharded",
        )


def _check_first(group: distributed.ProcessGroup) -> None:
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    if rank:
        raise ConfigError(
            f"rank {rank} of {size} would publish the whole model, as rank 0 may do already",
            hint="attach on rank 0 only, or on all ranks with writer=deltasync.Writer.of_process_group()",
        )
