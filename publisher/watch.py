"""Decide what is watched and how: one shard per catalog tensor, each with its source of changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from manifest.catalog import Catalog
from publisher.checkpoint import Checkpoint
from publisher.config import PublisherConfig
from publisher.errors import MappingMismatch, OptimizerRefused
from publisher.mapping import map_model
from publisher.naming import canonical_tensors
from publisher.optimizers import check_invertible, check_parameter, step_records
from publisher.shard import Shard, Source

_WIRE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass
class Watched:
    """The shards in catalog order, and those found by inversion by the `id()` of their live tensor."""

    model: nn.Module
    catalog: Catalog
    shards: tuple[Shard, ...]
    inverted: dict[int, Shard]

    def refresh(self) -> None:
        """Look the tensors up again: a buffer may have been replaced by assignment.

        Raises MappingMismatch if a name is gone or has another shape.
        """
        live = canonical_tensors(self.model)
        for shard in self.shards:
            tensor = live.get(shard.spec.name)
            if tensor is None or tuple(tensor.shape) != shard.spec.shape:
                raise MappingMismatch(
                    f"{shard.spec.name} is no longer a tensor of shape {shard.spec.shape} in the model",
                    hint="a publisher follows one architecture; attach a new one, with a stream of its own",
                )
            shard.tensor = tensor
        self.inverted = _inverted(self.shards)


def watch(
    model: nn.Module, optimizers: Sequence[Optimizer], checkpoint: Checkpoint | None, config: PublisherConfig
) -> Watched:
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
    shards = []
    for number, (spec, tensor) in enumerate(zip(mapped.catalog.tensors, mapped.tensors, strict=True)):
        source = Source.DIGEST
        if id(tensor) in stepped and spec.sparse:
            source = _source(spec.name, tensor, stepped[id(tensor)], config)
        shards.append(Shard(number, spec, tensor, source))
    watched = Watched(model, mapped.catalog, tuple(shards), _inverted(shards))
    for optimizer in optimizers:
        for parameter, record in step_records(optimizer, watched.inverted):
            watched.inverted[id(parameter)].step = record.step
    return watched


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
