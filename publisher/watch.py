"""Decide what is watched and how: one shard per catalog tensor, each with its source of changes."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from manifest.catalog import Catalog
from manifest.checkpoint import Checkpoint
from manifest.naming import canonical_tensors
from publisher.config import PublisherConfig
from publisher.errors import OptimizerRefused
from publisher.group import Writer
from publisher.mapping import ModelMap, check_still_fits, map_model
from publisher.optimizers import check_invertible, steps_taken
from publisher.ownership import Place, deal, place_owned
from publisher.shard import Shard, Source

_WIRE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


Masters = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""(16-bit parameter of the model, the master that an optimizer steps in its place) pairs."""


@dataclass(frozen=True)
class WatchPlan:
    """What to watch and how: live tensors, sources, masters, and the steps each has taken.

    `ids`, `starts`: of which catalog tensor each is, and from which element on. All tensors in catalog order, whole,
    unless this is one of several writers.
    """

    catalog: Catalog
    ids: tuple[int, ...]
    starts: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    sources: tuple[Source, ...]
    steps: tuple[int, ...]
    masters: tuple[torch.Tensor | None, ...]

    @property
    def inverted(self) -> dict[int, int]:
        """Catalog ids of the parameters found by inversion, by the `id()` of the live one."""
        rows = zip(self.ids, self.tensors, self.sources, strict=True)
        return {id(tensor): i for i, tensor, source in rows if source is Source.INVERSION}


@dataclass
class Watched:
    """The shards in catalog order; again by the `id()` of what the optimizer steps for them, by source.

    `given`: their tensors were named one by one, not found in the model.
    """

    model: nn.Module
    catalog: Catalog
    shards: tuple[Shard, ...]
    inverted: dict[int, Shard]
    copied: dict[int, Shard]
    given: bool

    def refresh(self) -> None:
        """Look the tensors up again: a buffer may have been replaced by assignment.

        Raises MappingMismatch if names, shapes, dtypes or ties are no longer those of the catalog.
        """
        live = canonical_tensors(self.model)
        check_still_fits(live, self.catalog)
        if not self.given:
            for shard in self.shards:
                shard.tensor = live[shard.spec.name]
            self.inverted = _inverted(self.shards)


def watch(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    checkpoint: Checkpoint | None,
    config: PublisherConfig,
    masters: Masters = (),
    writer: Writer | None = None,
) -> Watched:
    """Plan, and read every tensor once for its digests. Raises what `plan_watch` raises."""
    plan = plan_watch(model, optimizers, checkpoint, config, masters, writer)
    shards = make_shards(plan.catalog, plan.tensors, plan.sources, plan.steps, plan.ids, plan.starts)
    copied = {}
    for shard, master in zip(shards, plan.masters, strict=True):
        if master is not None:
            shard.master = master
            copied[id(master)] = shard
    given = writer is not None and writer.owned is not None
    return Watched(model, plan.catalog, shards, _inverted(shards), copied, given)


def make_shards(
    catalog: Catalog,
    tensors: Sequence[torch.Tensor],
    sources: Sequence[Source],
    steps: Sequence[int],
    ids: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
) -> tuple[Shard, ...]:
    """One shard per live tensor, with its source and the steps it has taken; see `WatchPlan`."""
    shards = []
    ids = range(len(tensors)) if ids is None else ids
    starts = [0] * len(tensors) if starts is None else starts
    for number, start, tensor, source, step in zip(ids, starts, tensors, sources, steps, strict=True):
        shard = Shard(number, catalog.tensors[number], tensor, source, start)
        shard.step = step
        shards.append(shard)
    return tuple(shards)


def plan_watch(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    checkpoint: Checkpoint | None,
    config: PublisherConfig,
    masters: Masters = (),
    writer: Writer | None = None,
) -> WatchPlan:
    """Map the model and choose a source for every tensor; as one of several writers, for those that it owns.

    Raises MappingMismatch, and OptimizerRefused naming the parameter and the reason.
    """
    mapped = map_model(model, checkpoint, _WIRE.get(config.inference_dtype or ""))
    stepped = _stepped(optimizers)
    places = _places(mapped, writer)
    names = {id(place.tensor): place.spec.name for place in places}
    master_of = _master_of(masters, names, stepped)
    if writer is not None and writer.owned is None:
        places = deal(places, stepped.keys() | master_of.keys(), writer)
    elif writer is None and not names.keys() & (stepped.keys() | master_of.keys()):
        raise OptimizerRefused(
            "no tensor of the model is in the optimizer: there would never be a change to publish",
            hint="attach the optimizer and the model that belong together",
        )
    sources, steps, used = [], [], []
    for place in places:
        spec, tensor = place.spec, place.tensor
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
    return WatchPlan(
        mapped.catalog,
        tuple(place.id for place in places),
        tuple(place.start for place in places),
        tuple(place.tensor for place in places),
        tuple(sources),
        tuple(steps),
        tuple(used),
    )


def _places(mapped: ModelMap, writer: Writer | None) -> list[Place]:
    """Every tensor of the model, or what the writer names as its own."""
    if writer is not None and writer.owned is not None:
        return place_owned(mapped.catalog, writer.owned)
    rows = enumerate(zip(mapped.catalog.tensors, mapped.tensors, strict=True))
    return [Place(i, spec, tensor) for i, (spec, tensor) in rows]


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
