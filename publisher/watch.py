"""Decide what is watched and how: one shard per catalog tensor, each with its source of changes."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from manifest.catalog import Catalog
from manifest.naming import canonical_tensors
from publisher.checkpoint import Checkpoint
from publisher.config import PublisherConfig
from publisher.errors import OptimizerRefused
from publisher.mapping import check_still_fits, map_model
from publisher.optimizers import check_invertible, steps_taken
from publisher.shard import Shard, Source

_WIRE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


Masters = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""(16-bit parameter of the model, the master that an optimizer steps in its place) pairs."""


@dataclass(frozen=True)
class WatchPlan:
    """What to watch and how, in catalog order: live tensors, sources, masters, and the steps each has taken."""

    catalog: Catalog
    tensors: tuple[torch.Tensor, ...]
    sources: tuple[Source, ...]
    steps: tuple[int, ...]
    masters: tuple[torch.Tensor | None, ...]

    @property
    def inverted(self) -> dict[int, int]:
        """Catalog ids of the parameters found by inversion, by the `id()` of the live one."""
        pairs = enumerate(zip(self.tensors, self.sources, strict=True))
        return {id(tensor): i for i, (tensor, source) in pairs if source is Source.INVERSION}


@dataclass
class Watched:
    """The shards in catalog order; again by the `id()` of what the optimizer steps for them, by source."""

    model: nn.Module
    catalog: Catalog
    shards: tuple[Shard, ...]
    inverted: dict[int, Shard]
    copied: dict[int, Shard]

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
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    checkpoint: Checkpoint | None,
    config: PublisherConfig,
    masters: Masters = (),
) -> Watched:
    """Plan, and read every tensor once for its digests. Raises what `plan_watch` raises."""
    plan = plan_watch(model, optimizers, checkpoint, config, masters)
    shards = make_shards(plan.catalog, plan.tensors, plan.sources, plan.steps)
    copied = {}
    for shard, master in zip(shards, plan.masters, strict=True):
        if master is not None:
            shard.master = master
            copied[id(master)] = shard
    return Watched(model, plan.catalog, shards, _inverted(shards), copied)


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
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    checkpoint: Checkpoint | None,
    config: PublisherConfig,
    masters: Masters = (),
) -> WatchPlan:
    """Map the model and choose a source for every tensor.

    Raises MappingMismatch, and OptimizerRefused naming the parameter and the reason.
    """
    mapped = map_model(model, checkpoint, _WIRE.get(config.inference_dtype or ""))
    stepped = _stepped(optimizers)
    names = {
        id(tensor): spec.name for spec, tensor in zip(mapped.catalog.tensors, mapped.tensors, strict=True)
    }
    master_of = _master_of(masters, names, stepped)
    if not names.keys() & (stepped.keys() | master_of.keys()):
        raise OptimizerRefused(
            "no tensor of the model is in the optimizer: there would never be a change to publish",
            hint="attach the optimizer and the model that belong together",
        )
    sources, steps, used = [], [], []
    for spec, tensor in zip(mapped.catalog.tensors, mapped.tensors, strict=True):
        step, master = 0, master_of.get(id(tensor))
        if not spec.sparse or (id(tensor) not in stepped and master is None):
            source = Source.DIGEST
        elif config.detect == "snapshot":
            source = Source.SNAPSHOT
        elif master is not None:
            source = Source.COPY
        else:
            source, (optimizer, group) = Source.INVERSION, stepped[id(tensor)]
            check_invertible(spec.name, tensor, optimizer, group)
            step = steps_taken(optimizer.state.get(tensor) or {})
        sources.append(source)
        steps.append(step)
        used.append(master if source is Source.COPY else None)
    return WatchPlan(mapped.catalog, mapped.tensors, tuple(sources), tuple(steps), tuple(used))


def _master_of(
    masters: Masters, names: Mapping[int, str], stepped: Container[int]
) -> dict[int, torch.Tensor]:
    """The master of each parameter, by the parameter's `id()`."""
    found, problems = {}, []
    for parameter, master in masters:
        name = names.get(id(parameter))
        if name is None:
            problems.append(f"a parameter of shape {tuple(parameter.shape)} is not in the model")
        elif id(parameter) in stepped:
            problems.append(f"{name} is in the optimizer itself, beside its master")
        elif id(master) not in stepped:
            problems.append(f"the master of {name} is in no optimizer")
        elif master.shape != parameter.shape or not master.is_floating_point():
            form, wanted = f"{master.dtype} {tuple(master.shape)}", tuple(parameter.shape)
            problems.append(f"the master of {name} is {form}, not floats of shape {wanted}")
        found[id(parameter)] = master
    if problems:
        raise OptimizerRefused(
            "masters do not fit: " + "; ".join(problems[:30]),
            hint="give (parameter of the model, the master that the attached optimizer steps for it) pairs",
        )
    return found


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
