"""Which parts of the model one of several writers watches: those it names, or its share of what all of them step."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from manifest.catalog import Catalog, TensorSpec
from publisher.errors import MappingMismatch
from publisher.group import Owned, Writer
from publisher.mapping import castable


@dataclass(frozen=True)
class Place:
    """A live tensor that holds the elements of catalog tensor `id` from `start` on."""

    id: int
    spec: TensorSpec
    tensor: torch.Tensor
    start: int = 0


def place_owned(catalog: Catalog, owned: Sequence[Owned]) -> list[Place]:
    """The places of what a writer names, in catalog order. Raises MappingMismatch naming every one that is none."""
    places, problems = [], []
    for one in owned:
        number = catalog.ids.get(catalog.aliases.get(one.name, one.name))
        if number is None:
            problems.append(f"{one.name} is not a tensor of the model")
            continue
        spec, stop = catalog.tensors[number], one.start + one.tensor.numel()
        if one.start < 0 or stop > spec.numel:
            problems.append(f"{one.name} has {spec.numel} elements, not {one.start}…{stop}")
        elif not castable(one.tensor.dtype, spec.dtype):
            problems.append(f"{one.name} is {one.tensor.dtype} and cannot be sent as {spec.dtype}")
        else:
            places.append(Place(number, spec, one.tensor, one.start))
    if problems:
        raise MappingMismatch(
            "what this writer owns does not fit the model: " + "; ".join(problems[:30]),
            hint="name each range by its tensor in the checkpoint, its first flat index and its elements",
        )
    return sorted(places, key=lambda place: (place.id, place.start))


def deal(places: Sequence[Place], stepped: Container[int], writer: Writer) -> list[Place]:
    """One writer's share where all of them have the whole model: whole tensors, about equal in size.

    `stepped`: `id()` of the parameters that every writer's optimizer steps. All else belongs to writer 0.
    """
    loads = [0] * writer.world_size
    mine = []
    for place in sorted(places, key=lambda place: (-place.spec.numel, place.id)):
        rank = loads.index(min(loads)) if id(place.tensor) in stepped else 0
        loads[rank] += place.spec.numel
        if rank == writer.rank:
            mine.append(place)
    return sorted(mine, key=lambda place: place.id)
