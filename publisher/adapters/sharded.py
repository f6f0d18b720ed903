"""Parameters that are DTensors: FSDP2 (`fully_shard`), hybrid sharding, tensor parallelism, and these crossed."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from chunkstore.digest_torch import digest
from manifest.catalog import Catalog
from publisher.adapters.base import Piece
from publisher.adapters.plain import Masters, PlainAdapter
from publisher.errors import MappingMismatch, OptimizerRefused
from publisher.group import Writer

_SHOWN: Final = 10


class ShardedAdapter(PlainAdapter):
    """A DTensor's local shard is a box of the whole tensor. What is no DTensor every rank has whole.

    Of ranks that hold the same shard (hybrid sharding, norms beside tensor-parallel matrices) each publishes some.
    """

    kind = "DTensor"
    sharable = False

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], masters: Masters, writer: Writer
    ) -> None:
        super().__init__(model, optimizers, masters, writer)
        self.ranks = writer.world_size
        self._group, self._rank = writer.group, writer.rank
        live = self.named()
        if not any(self.stepping(tensor)["key"] is not None for tensor in live.values()):
            raise OptimizerRefused(
                "no parameter of the model is in the optimizer: there would never be a change to publish",
                hint="make the optimizer after fully_shard and parallelize_module, which replace the parameters",
            )
        shards = any(isinstance(module, FSDPModule) for module in model.modules())
        self.kind = f"{'FSDP2' if shards else 'DTensor'} ({_layouts(live)})"

    def named(self) -> Mapping[str, torch.Tensor]:
        """See `Adapter`. After a forward without a backward FSDP2 leaves whole parameters in the root: they go back."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().named()

    def pieces_of(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """See `PlainAdapter`."""
        if not isinstance(tensor, DTensor):
            yield Piece(name, tensor, **self.stepping(tensor))
            return
        local = self.local(tensor)
        if not local.numel():
            return
        _, at = _box(name, tensor)
        stride = _row_major(tensor.shape)
        start = sum(o * s for o, s in zip(at, stride, strict=True))
        yield Piece(name, local, start, stride, **self.stepping(tensor))

    def replicas(self, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
        """See `Adapter`. Meshes do not tell: other ranks may hold the same in a mesh of their own."""
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, places in enumerate(self._told([_place(piece) for piece in pieces])):
            for place in places:
                holders[place].append(rank)
        return [tuple(holders[_place(piece)]) for piece in pieces]

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `PlainAdapter`."""
        if not isinstance(tensor, DTensor):
            return tensor
        with torch.no_grad():
            return tensor.to_local()

    def problems(self, catalog: Catalog) -> list[str]:
        """See `Adapter`: what this rank holds must be what torch's own gathering puts in its place, bit for bit, and
        what several ranks step alike must be the same on all of them.

        One tensor at a time is gathered whole on every rank.
        """
        live, own = self.named(), []
        for spec in catalog.tensors:
            tensor = live[spec.name]
            if isinstance(tensor, DTensor):
                with (
                    torch.no_grad()
                ):  # shards that FSDP offloads are gathered where its ranks can communicate
                    there = tensor.to(tensor.device_mesh.device_type)
                    assert isinstance(there, DTensor)
                    whole = there.full_tensor()
                for piece in self.pieces_of(spec.name, tensor):
                    own += _misplaced(piece, tensor, whole)
        stepped = [piece for piece in self.pieces(catalog) if piece.key is not None]
        held = self._told({_place(piece): digest(piece.name, piece.tensor) for piece in stepped})
        first: dict[str, tuple[int, int]] = {}
        for rank, digests in enumerate(held):
            for place, found in digests.items():
                other, expected = first.setdefault(place, (rank, found))
                if found != expected and rank == self._rank:
                    own.append(f"{place.partition(' ')[0]} differs from what rank {other} holds of it")
        return [
            f"rank {rank}: {problem}"
            for rank, problems in enumerate(self._told(own[:_SHOWN]))
            for problem in problems
        ]

    def _told(self, mine: Any) -> list[Any]:
        """What every rank says. Collective."""
        told: list[Any] = [None] * self.ranks
        distributed.all_gather_object(told, mine, group=self._group)
        return told


def _place(piece: Piece) -> str:
    region = piece.region
    return f"{piece.name} {region.start} {region.size} {region.stride}"


def _misplaced(piece: Piece, tensor: DTensor, whole: torch.Tensor) -> list[str]:
    shape, _ = _box(piece.name, tensor)
    if tuple(piece.tensor.shape) != shape:
        found = f"{tuple(piece.tensor.shape)}, which by placements {tensor.placements} should be {shape}"
        return [f"{piece.name} has a shard of shape {found}"]
    if piece.region.last >= whole.numel():
        return [f"{piece.name} would reach element {piece.region.last} of {whole.numel()}"]
    assert piece.stride is not None
    wanted = whole.contiguous().as_strided(piece.tensor.shape, piece.stride, piece.start)
    bits = (x.detach().reshape(-1).view(torch.uint8) for x in (wanted.to(piece.tensor.device), piece.tensor))
    return [] if torch.equal(*bits) else [f"{piece.name} holds other values than torch gathers in its place"]


def _box(name: str, tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and first index of this rank's box."""
    others = [
        p for p in tensor.placements if not (p.is_shard() or isinstance(p, Shard | Replicate) or _strided(p))
    ]
    if others:
        raise MappingMismatch(
            f"{name} has placement {others[0]}: its value is not known before it is reduced",
            hint="only parameters that are sharded or replicated can be published",
        )
    shape, at = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(at)


def _strided(placement: object) -> bool:
    """FSDP over a dimension that is sharded already; a private class until torch has a name for it."""
    return type(placement).__name__ == "_StridedShard"


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _layouts(named: Mapping[str, torch.Tensor]) -> str:
    """The distinct placements in the model, for people."""
    seen = dict.fromkeys(
        f"{'×'.join(map(str, t.device_mesh.shape))}: {', '.join(map(str, t.placements))}"
        for t in named.values()
        if isinstance(t, DTensor)
    )
    return "; ".join(islice(seen, 4)) + ("; …" if len(seen) > 4 else "")
