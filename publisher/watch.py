"""Decide what is watched and how: one shard per catalog tensor, each with its source of changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from manifest.catalog import Catalog
from publisher.checkpoint import Checkpoint
from publisher.config import PublisherConfig
from publisher.errors import OptimizerRefused
from publisher.mapping import check_still_fits, map_model
from publisher.naming import canonical_tensors
from publisher.optimizers import check_invertible, check_parameter, steps_taken
from publisher.shard import Shard, Source

_WIRE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class WatchPlan:
    """What to watch and how, in catalog order: live tensors, sources, and the steps each parameter has taken."""

    catalog: Catalog
    tensors: tuple[torch.Tensor, ...]
    sources: tuple[Source, ...]
    steps: tuple[int, ...]

    @property
    def inverted(self) -> dict[int, int]:
        """Catalog ids of the parameters found by inversion, by the `id()` of the live one."""
        pairs = enumerate(zip(self.tensors, self.sources, strict=True))
        return {id(tensor): i for i, (tensor, source) in pairs if source is Source.INVERSION}


@dataclass
class Watched:
    """The shards in catalog order, and those found by inversion by the `id()` of their live tensor."""

    model: nn.Module
    catalog: Catalog
    shards: tuple[Shard, ...]
    inverted: dict[int, Shard]

    def refresh(self) -> None:
        """Look the tensors up again: a buffer may have been replaced by assignment.

        Raises MappingMismatch if names, shapes, dtypes or ties are no longer those of the catalog.
        """
        live = canonical_tensors(self.model)
        check_still_fits(live, self.catalog)
        for shard in self.shards:
            shard.tensor = live[shard.spec.name]
        self.inverted = _inverted(self.shards)


def watch(
    model: nn.Module, optimizers: Sequence[Optimizer], checkpoint: Checkpoint | None, config: PublisherConfig
) -> Watched:
    """Plan, and read every tensor once for its digests. Raises what `plan_watch` raises."""
    plan = plan_watch(model, optimizers, checkpoint, config)
    shards = make_shards(plan.catalog, plan.tensors, plan.sources, plan.steps)
    return Watched(model, plan.catalog, shards, _inverted(shards))


def make_shards(
    catalog: Catalog, tensors: Sequence[torch.Tensor], sources: Sequence[Source], steps: Sequence[int]
) -> tuple[Shard, ...]:
    """One shard per catalog tensor: live tensor, source and steps taken."""
    shards = []
    for number, (spec, tensor, source) in enumerate(zip(catalog.tensors, tensors, sources, strict=True)):
        shard = Shard(number, spec, tensor, source)
        shard.step = steps[number]
        shards.append(shard)
    return tuple(shards)


def plan_watch(
    model: nn.Module, optimizers: Sequence[Optimizer], checkpoint: Checkpoint | None, config: PublisherConfig
) -> WatchPlan:
    """Map the model and choose a source for every tensor.

    Raises MappingMismatch, and OptimizerRefused naming the parameter and the reason.
    """
    mapped = map_model(model, checkpoint, _WIRE.get(config.inference_dtype or ""))
    stepped = _stepped(optimizers)
    names = {
        id(tensor): spec.name for spec, tensor in zip(mapped.catalog.tensors, mapped.tensors, strict=True)
    }
    if not names.keys() & stepped.keys():
        raise OptimizerRefused(
            "no tensor of the model is in the optimizer: there would never be a change to publish",
            hint="attach the optimizer and the model that belong together",
        )
    sources, steps = [], []
    for spec, tensor in zip(mapped.catalog.tensors, mapped.tensors, strict=True):
        source, step = Source.DIGEST, 0
        if id(tensor) in stepped and spec.sparse:
            source = _source(spec.name, tensor, stepped[id(tensor)], config)
            step = steps_taken(stepped[id(tensor)][0].state.get(tensor) or {})
        sources.append(source)
        steps.append(step)
    return WatchPlan(mapped.catalog, mapped.tensors, tuple(sources), tuple(steps))


def _source(
    name: str, tensor: torch.Tensor, where: tuple[Optimizer, dict[str, object]], config: PublisherConfig
) -> Source:
    if config.detect == "snapshot":
        return Source.SNAPSHOT
    optimizer, group = where
    check_invertible(optimizer)
    check_parameter(name, tensor, group)
    return Source.INVERSION


def _stepped(optimizers: Sequence[Optimizer]) -> Mapping[int, tuple[Optimizer, dict[str, object]]]:
    """The optimizer and group of each parameter, by `id()`."""
    found: dict[int, tuple[Optimizer, dict[str, object]]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in found:
                    raise OptimizerRefused(
                        f"a parameter of shape {tuple(parameter.shape)} is in two optimizers",
                        hint="its steps could not be told apart: give each parameter one optimizer",
                    )
                found[id(parameter)] = (optimizer, group)
    return found


def _inverted(shards: Sequence[Shard]) -> dict[int, Shard]:
    return {id(shard.tensor): shard for shard in shards if shard.source is Source.INVERSION}
