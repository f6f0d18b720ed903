"""Kinds of trainers, and how to tell which one is given.

In: an optimizer and a model, as the framework made them. Out: shards of canonical tensors with what steps them
(`base.Adapter`). An adapter knows its framework and nothing of versions, stores, or how changes are found.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from chunkstore.errors import ConfigError
from manifest.checkpoint import Checkpoint
from manifest.naming import canonical_tensors
from publisher.adapters.base import Adapter, Selection
from publisher.adapters.given import GivenAdapter
from publisher.adapters.lora import Lora, check_no_lora, select
from publisher.adapters.megatron import MegatronAdapter
from publisher.adapters.plain import Masters, PlainAdapter
from publisher.adapters.ranks import Ranks
from publisher.errors import OptimizerRefused
from publisher.group import Writer


def recognise(
    optimizer: Any,
    model: Any,
    masters: Masters,
    writer: Writer | None,
    checkpoint: Checkpoint | None,
    lora: Lora | None,
) -> tuple[Adapter, Writer | None]:
    """The adapter for what is given, and this process's place among the writers; None: it feeds the stream alone.

    Where the model is spread over ranks and no `writer` is given, all ranks of torch.distributed are the writers, who
    have to ask together. `checkpoint`: what the run started from. `lora`: as in publisher.yaml. Frameworks that are not
    imported cannot have made anything, and are not imported here.
    Raises OptimizerRefused, ConfigError, MappingMismatch.
    """
    if _any([optimizer], "megatron.core.optimizer.optimizer", "MegatronOptimizer"):
        check_no_lora(model, lora, "Megatron-Core's optimizer")
        return _megatron(optimizer, model, list(masters), writer, checkpoint)
    optimizers = _torch_optimizers(optimizer)
    selected = partial(select, model, optimizers, masters, lora)
    if writer is not None and writer.owned is not None:
        return GivenAdapter(model, optimizers, masters, writer, selected()), writer
    if _any(model.modules(), "torch.distributed.fsdp", "FullyShardedDataParallel"):
        raise OptimizerRefused(
            "the model is wrapped in FullyShardedDataParallel: its flat parameters do not tell which tensors they hold",
            hint="use fully_shard (FSDP2), or name the shards: deltasync.Owned",
        )
    if _any(optimizers, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
        return _zero_redundancy(optimizers, model, list(masters), writer, selected)
    if _any(
        [*canonical_tensors(model).values(), *_stepped(optimizers)], "torch.distributed.tensor", "DTensor"
    ):
        return _sharded(optimizers, model, masters, writer, selected)
    if writer is None and isinstance(model, DistributedDataParallel):
        _check_first(model)
    return PlainAdapter(model, optimizers, masters, writer, selection=selected()), writer


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


def _stepped(optimizers: Sequence[Optimizer]) -> Iterable[torch.Tensor]:
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def _megatron(
    optimizer: Any,
    model: Any,
    masters: Sequence[object],
    writer: Writer | None,
    checkpoint: Checkpoint | None,
) -> tuple[Adapter, Writer]:
    if masters or (writer is not None and writer.owned is not None):
        raise OptimizerRefused(
            "Megatron-Core's optimizer is given together with masters or owned shards, which it tells by itself",
            hint="give it alone",
        )
    ranks = Ranks(writer or Writer.of_process_group())
    return ranks.together(lambda: MegatronAdapter(model, optimizer, ranks, checkpoint)), ranks.writer


def _sharded(
    optimizers: Sequence[Optimizer],
    model: nn.Module,
    masters: Masters,
    writer: Writer | None,
    selected: Callable[[], Selection],
) -> tuple[Adapter, Writer]:
    from publisher.adapters.sharded import ShardedAdapter, reshard

    def found() -> Adapter:
        reshard(model)
        return ShardedAdapter(model, optimizers, masters, ranks, selected())

    ranks = Ranks(writer or Writer.of_process_group())
    return ranks.together(found), ranks.writer


def _zero_redundancy(
    optimizers: Sequence[Any],
    model: nn.Module,
    masters: Sequence[object],
    writer: Writer | None,
    selected: Callable[[], Selection],
) -> tuple[Adapter, Writer]:
    from publisher.adapters.zero_redundancy import ZeroRedundancyAdapter

    if len(optimizers) > 1 or masters:
        raise OptimizerRefused(
            "ZeroRedundancyOptimizer is given together with other optimizers or masters", hint="give it alone"
        )
    ranks = Ranks(writer or Writer.of_process_group(group=optimizers[0].process_group))
    return ranks.together(
        lambda: ZeroRedundancyAdapter(model, optimizers[0], ranks, selected())
    ), ranks.writer


def _check_first(model: DistributedDataParallel) -> None:
    rank, size = distributed.get_rank(model.process_group), distributed.get_world_size(model.process_group)
    if rank:
        raise ConfigError(
            f"rank {rank} of {size} would publish the whole model, as rank 0 may do already",
            hint="attach on rank 0 only, or on all ranks with writer=deltasync.Writer.of_process_group()",
        )
