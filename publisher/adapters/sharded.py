"""Parameters that are DTensors: FSDP2 (`fully_shard`), hybrid sharding, tensor parallelism, and these crossed."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from manifest.catalog import Catalog
from publisher.adapters.base import Piece, Selection, same_bits
from publisher.adapters.plain import Masters, PlainAdapter, check_readable, place
from publisher.adapters.ranks import Ranks
from publisher.errors import MappingMismatch, OptimizerRefused

_SHOWN: Final = 10

_REPLACED: Final = "make the optimizer after fully_shard and parallelize_module, which replace the parameters"


class ShardedAdapter(PlainAdapter):
    """A DTensor's local shard is a box of the whole tensor. What is no DTensor every rank has whole.

    Of ranks that hold the same shard (hybrid sharding, norms beside tensor-parallel matrices) each publishes some.
    """

    kind = "DTensor"
    sharable = False

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        masters: Masters,
        ranks: Ranks,
        selection: Selection,
    ) -> None:
        super().__init__(model, optimizers, masters, ranks, selection=selection)
        self.ranks = ranks.size
        live = self.named()
        if not any(isinstance(tensor, DTensor) for tensor in live.values()):
            raise OptimizerRefused(
                "the optimizer steps shards, and the model has none",
                hint="give the whole model that fully_shard was called on: it alone takes back the whole parameters "
                "that a forward pass leaves in a part of it",
            )
        if not any(self.stepping(tensor)["key"] is not None for tensor in live.values()):
            raise OptimizerRefused(
                "no parameter of the model is in the optimizer: there would never be a change to publish",
                hint=_REPLACED,
            )
        left = self._left_behind(live)
        if left:
            raise OptimizerRefused(
                f"the optimizer was made before {', '.join(left[:_SHOWN])} were sharded, and steps what is no longer"
                " in the model: they would never change",
                hint=_REPLACED,
            )
        shards = any(isinstance(module, FSDPModule) for module in model.modules())
        self.kind = f"{'FSDP2' if shards else 'DTensor'} ({_layouts(live)}){selection.kind}"

    def named(self) -> Mapping[str, torch.Tensor]:
        """See `Adapter`. After a forward without a backward FSDP2 leaves whole parameters in the root: they go back."""
        reshard(self._model)
        return super().named()

    def pieces_of(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """See `PlainAdapter`."""
        if not isinstance(tensor, DTensor):
            yield from super().pieces_of(name, tensor)
            return
        local = self.local(tensor)
        check_readable(name, local)
        _check_gathers(name, tensor)
        if not local.numel():
            return
        _, at = _box(name, tensor)
        stride = _row_major(tensor.shape)
        start = sum(o * s for o, s in zip(at, stride, strict=True))
        yield Piece(name, local, start, stride, **self.stepping(tensor))

    def replicas(self, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
        """See `Adapter`. Meshes do not tell: other ranks may hold the same in a mesh of their own."""
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, places in enumerate(self._ranks.told([place(piece) for piece in pieces])):
            for held in places:
                holders[held].append(rank)
        return [tuple(holders[place(piece)]) for piece in pieces]

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
        strange = self._ranks.strange(catalog)
        if strange:  # to gather tensors one by one, all ranks have to have the same
            return strange
        live, own = self.named(), []
        for spec in catalog.tensors:
            tensor = live[spec.name]
            if isinstance(tensor, DTensor):
                with torch.no_grad():
                    # Shards that FSDP offloads are gathered where its ranks can communicate.
                    there = tensor.to(tensor.device_mesh.device_type)
                    assert isinstance(there, DTensor)
                    whole = there.full_tensor()
                for piece in self.pieces_of(spec.name, tensor):
                    own += _misplaced(piece, tensor, whole)
        return self._compared(own, catalog)

    def _left_behind(self, live: Mapping[str, torch.Tensor]) -> list[str]:
        """Shards to be trained that nothing steps, while an optimizer steps a whole tensor of that shape outside."""
        known = {id(t) for t in [*live.values(), *self._masters.values()]}
        strangers = {
            tuple(it.parameter.shape)
            for key, it in self._stepped.items()
            if key not in known and not isinstance(it.parameter, DTensor)
        }
        return [
            name
            for name, t in live.items()
            if isinstance(t, DTensor)
            and t.requires_grad
            and self.stepping(t)["key"] is None
            and tuple(t.shape) in strangers
        ]


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters that FSDP2 has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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
    if same_bits(wanted, piece.tensor):
        return []
    return [f"{piece.name} holds other values than torch gathers in its place"]


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


def _check_gathers(name: str, tensor: DTensor) -> None:
    """Raises MappingMismatch, on all ranks alike, for what torch's own gathering would fail at on some of them."""
    twice = {getattr(p, "dim", None) for p in tensor.placements if _strided(p)}
    for placement, parts in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if isinstance(placement, Shard) and not _strided(placement) and placement.dim in twice:
            size = tensor.shape[placement.dim]
            each = -(-size // parts)
            if each and -(-size // each) < parts:
                raise MappingMismatch(
                    f"{name} has {size} elements in dimension {placement.dim}, which are cut in {parts} parts and these"
                    " once more: torch cannot gather what leaves some ranks without any",
                    hint="leave it out of the tensor-parallel plan",
                )


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
