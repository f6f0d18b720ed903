"""DeepSpeed's ZeRO-1, ZeRO-2 and BF16_Optimizer: every rank has the whole model, and steps a part of it in fp32.

The trained parameters of a group lie one after the other in a flat buffer, which is cut in equal parts. Each rank
publishes of every tensor what lies in its own part. Nothing of DeepSpeed is imported: the optimizer tells all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from chunkstore.digest_torch import digest
from manifest.catalog import Catalog
from publisher.adapters.base import Piece, same_bits
from publisher.adapters.flat import Flat
from publisher.adapters.groupwise import REPORT, SUPPORTED, GroupwiseAdapter
from publisher.adapters.lora import Lora, select
from publisher.adapters.plain import check_readable
from publisher.adapters.ranks import Ranks
from publisher.errors import MappingMismatch, OptimizerRefused

_BUFFERS: Final = {
    "DeepSpeedZeroOptimizer": ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups"),
    "BF16_Optimizer": ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"),
}
"""By optimizer, the names of its lists: of each group its parameters, their flat buffer, and this rank's masters."""

_WHOLE: Final = "every rank steps all of the model; with zero_optimization.stage 1 each steps a part"
_REFUSED: Final = {
    "FP16_Optimizer": _WHOLE,
    "FP16_UnfusedOptimizer": _WHOLE,
    "ZenFlowZeroOptimizerSequential": "with zenflow some parameters are stepped later than others",
    "ZenFlowZeroOptimizerParallel": "with zenflow the optimizer steps in another process",
}
"""Other optimizers, and why not."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A trained parameter, and what this rank has of its group. `at`: where in that it would begin; before 0, or behind
    the end, other ranks have it.
    """

    parameter: torch.Tensor
    flat: Flat
    at: int

    def piece(self, name: str) -> Piece | None:
        """What this rank has of it; None: nothing."""
        first, stop = max(self.at, 0), min(self.at + self.parameter.numel(), self.flat.own.numel())
        return self.flat.piece(name, first - self.at, first, stop - first) if first < stop else None


class DeepSpeedAdapter(GroupwiseAdapter):
    """`optimizer`: what deepspeed.initialize returned. `model`: its engine, or the module in that.
    `lora`: as in publisher.yaml.

    Raises OptimizerRefused, MappingMismatch, ConfigError.
    """

    kind = "DeepSpeed"

    def __init__(self, model: nn.Module, optimizer: Any, ranks: Ranks, lora: Lora | None) -> None:
        _check_followed(optimizer, model, ranks)
        self._optimizer = optimizer
        self._placed = _placed(optimizer)
        masters = [(placed.parameter, placed.flat.master) for placed in self._placed.values()]
        selection = select(model, [optimizer.optimizer], masters, lora, None)
        super().__init__(model, [optimizer.optimizer], (), ranks, selection=selection)
        self.check_belongs(parameter for parameter, _ in masters)
        self.ranks = ranks.size
        self.kind = _kind(optimizer) + selection.kind

    def pieces(self, catalog: Catalog) -> list[Piece]:
        """See `Adapter`."""
        self.look()
        self._placed = _placed(self._optimizer)
        return super().pieces(catalog)

    def buffers(self) -> Sequence[torch.Tensor]:
        """See `GroupwiseAdapter`."""
        _, flats, _ = _BUFFERS[type(self._optimizer).__name__]
        found: list[torch.Tensor] = getattr(self._optimizer, flats)
        return found

    def pieces_of(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """See `PlainAdapter`."""
        check_readable(name, tensor)
        placed = self._placed.get(id(tensor))
        piece = Piece(name, tensor) if placed is None else placed.piece(name)
        if piece is not None:
            yield piece

    def replicas(self, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
        """See `Adapter`. What is not trained, all ranks have."""
        own = (self._ranks.rank,)
        return [self.everyone if piece.key is None else own for piece in pieces]

    def problems(self, catalog: Catalog) -> list[str]:
        """See `Adapter`: this rank's masters must be, rounded, what the model has in their place, and all ranks must
        have the same parameters.
        """
        strange = self._ranks.strange(catalog)
        if strange:
            return strange
        live = self.named()
        own = [text for piece in self.pieces(catalog) for text in _misplaced(piece, live[piece.name])]
        return self._compared(own, catalog)

    def _copies(self, catalog: Catalog) -> dict[str, int]:
        live = self.named()
        return {
            spec.name: digest(spec.name, live[spec.name].detach())
            for spec in catalog.tensors
            if isinstance(live[spec.name], nn.Parameter)
        }


def _kind(optimizer: Any) -> str:
    """For people."""
    name = getattr(optimizer, "zero_stage_string", type(optimizer).__name__)
    return f"DeepSpeed {name} ({type(optimizer.optimizer).__name__})"


def _check_followed(optimizer: Any, model: nn.Module, ranks: Ranks) -> None:
    """Raises OptimizerRefused naming everything that cannot be followed."""
    name = type(optimizer).__name__
    if name not in _BUFFERS:
        reason = _REFUSED.get(name, "it is not known here")
        raise OptimizerRefused(f"DeepSpeed's {name} cannot be followed: {reason}", hint=SUPPORTED)
    problems = []
    if not isinstance(optimizer.optimizer, Optimizer):
        problems.append(f"{type(optimizer.optimizer).__name__} is not a torch optimizer: nothing is stepped")
    if any(kind.__name__ == "PipelineModule" for m in model.modules() for kind in type(m).__mro__):
        problems.append("PipelineModule: each stage has layers of its own, which are named by their number")
    if optimizer.has_moe_layers:
        problems.append("MoE layers: ranks have different experts under the same names")
    for group in {id(group): group for group in optimizer.real_dp_process_group}.values():
        size = distributed.get_world_size(group)
        if size != ranks.size:
            problems.append(
                f"{size} ranks share a group of parameters, and {ranks.size} attach: with tensor, pipeline or expert"
                " parallelism not all have the same ones"
            )
    if problems:
        raise OptimizerRefused(
            "this DeepSpeed optimizer cannot be followed: " + "; ".join(problems), hint=SUPPORTED
        )


def _placed(optimizer: Any) -> dict[int, Placed]:
    """Every trained parameter, by its `id()`. Where they lie is told by their memory. Raises MappingMismatch."""
    found = {}
    lists = (getattr(optimizer, name) for name in _BUFFERS[type(optimizer).__name__])
    for number, (group, whole, master) in enumerate(zip(*lists, strict=True)):
        ranks = optimizer.real_dp_process_group[number]
        size = whole.numel() // distributed.get_world_size(ranks)
        first = size * distributed.get_rank(ranks)
        flat = Flat(whole.detach()[first : first + size], master)
        if master.numel() != size:
            raise MappingMismatch(
                f"group {number} of DeepSpeed's optimizer has {master.numel()} masters for {size} elements",
                hint=REPORT,
            )
        for parameter in group:
            if parameter.numel():
                found[id(parameter)] = Placed(parameter, flat, _offset(parameter, whole) - first)
    return found


def _offset(parameter: torch.Tensor, whole: torch.Tensor) -> int:
    """Where in the flat buffer `whole` it begins."""
    if parameter.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        raise MappingMismatch(
            f"a trained parameter of shape {tuple(parameter.shape)} lies outside the flat buffer of its group",
            hint="it was given other memory after deepspeed.initialize: DeepSpeed would not train it any more",
        )
    return int(parameter.storage_offset() - whole.storage_offset())


def _misplaced(piece: Piece, parameter: torch.Tensor) -> list[str]:
    if piece.master is None:
        return []
    there = parameter.detach().view(-1)[piece.start : piece.start + piece.tensor.numel()]
    if not same_bits(there, piece.tensor):
        return [f"{piece.name} has other values where this rank's part of it should lie"]
    if not same_bits(there, piece.master.to(there.dtype)):
        return [f"{piece.name} differs from its master, which the next step would copy to it"]
    return []
