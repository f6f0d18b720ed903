"""Megatron-Core's DistributedOptimizer: bf16 parameters, their fp32 masters cut among data-parallel ranks.

Every rank publishes the ranges that its optimizer steps, wherever they lie in the checkpoint. Nothing of Megatron is
imported: the model and the optimizer tell what there is.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from chunkstore.digest_torch import digest
from chunkstore.errors import ConfigError
from manifest.catalog import Catalog
from manifest.checkpoint import Checkpoint
from publisher.adapters.base import Piece, View
from publisher.adapters.lora import WholeModel
from publisher.adapters.megatron_config import read_architecture
from publisher.adapters.megatron_geometry import EMBEDDING, HEAD, Architecture, Coordinates, Local, place_all
from publisher.adapters.plain import PlainAdapter
from publisher.adapters.ranks import Ranks
from publisher.errors import MappingMismatch, OptimizerRefused


@dataclass(frozen=True)
class Chunk:
    """A part of the model that this rank has: one, or several with an interleaved pipeline."""

    gpt: Any
    at: Coordinates

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.gpt.named_parameters())


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `start` … `stop` of a parameter, and what an inner optimizer steps for them: `stepped`, flat.

    `master`: whether that is a copy of its own, which goes to the parameter after the step.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    stepped: torch.Tensor
    master: bool


class MegatronAdapter(PlainAdapter):
    """`optimizer`: what get_megatron_optimizer returned. `model`: a model chunk, or all of this rank's.

    Raises OptimizerRefused, MappingMismatch, ConfigError.
    """

    kind = "Megatron-Core"
    sharable = False

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        ranks: Ranks,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._read(model, optimizer, checkpoint)
        super().__init__(
            nn.ModuleList(chunk.gpt for chunk in self._chunks),
            [o.optimizer for o in self._distributed],
            (),
            ranks,
            selection=WholeModel(nn.ModuleList()),
        )
        self.ranks = ranks.size
        self.kind = _kind(self._chunks[0])

    def _read(
        self, model: nn.Module | Sequence[nn.Module], optimizer: Any, checkpoint: Checkpoint | None
    ) -> None:
        """What is given, all that can be wrong with it included."""
        self._distributed = _distributed_optimizers(optimizer)
        self._chunks = [_chunk(module) for module in ([model] if isinstance(model, nn.Module) else model)]
        first = self._chunks[0].gpt
        self._architecture = _architecture(first, checkpoint)
        self._named = _meta(self._architecture, first.config.params_dtype)
        for _ in self._placed():
            pass

    def named(self) -> Mapping[str, torch.Tensor]:
        """See `Adapter`: what the model's sizes make the checkpoint."""
        return self._named

    def pieces(self, catalog: Catalog) -> list[Piece]:
        """See `Adapter`."""
        ranges: dict[int, list[Range]] = defaultdict(list)
        for one in self._distributed:
            for found in _ranges(one):
                ranges[id(found.parameter)].append(found)
        pieces: list[Piece] = []
        for parameter, local in self._placed():
            if local.copy:
                continue
            for found in ranges[id(parameter)]:
                pieces += _pieces(found, local)
            if not parameter.requires_grad:
                pieces += [
                    Piece(
                        run.name,
                        _part(parameter, run.start, run.region.size),
                        run.region.start,
                        run.region.stride,
                    )
                    for run in local.runs
                    if run.name is not None and run.region is not None
                ]
        return pieces

    def replicas(self, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
        """See `Adapter`. What is frozen, all data-parallel ranks have whole."""
        holders: dict[tuple[str, int], list[int]] = defaultdict(list)
        frozen = [(piece.name, piece.start) for piece in pieces if piece.key is None]
        for rank, places in enumerate(self._ranks.told(frozen)):
            for place in places:
                holders[place].append(rank)
        return [
            (self._ranks.rank,) if piece.key is not None else tuple(holders[piece.name, piece.start])
            for piece in pieces
        ]

    def refusal(self, piece: Piece) -> str | None:
        """See `Adapter`."""
        assert piece.key is not None
        if self._stepped[piece.key].parameter.dtype != torch.float32:
            return (
                "is written by the optimizer's kernel together with its master, as use_precision_aware_optimizer does, "
                "and no old value is left after the step"
            )
        return super().refusal(piece)

    def _copies(self, catalog: Catalog) -> dict[str, int]:
        """Norms, tied embeddings, and whatever else tensor-parallel ranks or pipeline stages hold alike.

        None with overlap_param_gather, where a rank may have other ranks' ranges only with its next forward pass.
        """
        held: dict[str, int] = {}
        late = any(one.ddp_config.overlap_param_gather for one in self._distributed)
        for parameter, local in self._placed():
            for run in local.runs if local.shared and not late else ():
                if run.name is not None and run.region is not None:
                    part = _part(parameter, run.start, (run.numel,))
                    held[f"{run.name} {run.region}"] = digest(run.name, part)
        return held

    def _placed(self) -> Iterator[tuple[nn.Parameter, Local]]:
        """Every parameter that this rank has, and where it lies. Raises MappingMismatch."""
        for chunk in self._chunks:
            parameters = chunk.parameters()
            shapes = {name: tuple(p.shape) for name, p in parameters.items()}
            for name, local in place_all(shapes, self._architecture, chunk.at).items():
                yield parameters[name], local


def _distributed_optimizers(optimizer: Any) -> list[Any]:
    """The DistributedOptimizers in a chain, those that step something. Raises OptimizerRefused naming all else."""
    found, problems = [], []
    chained = type(optimizer).__name__ == "ChainedOptimizer"  # which others derive from
    for one in optimizer.chained_optimizers if chained else [optimizer]:
        name, inner = type(one).__name__, getattr(one, "optimizer", None)
        if name == "LayerWiseDistributedOptimizer":
            problems.append(f"{name}: its sharding is not known")
        elif name != "DistributedOptimizer":
            problems.append(f"{name} is not the DistributedOptimizer: set use_distributed_optimizer")
        elif one.is_stub_optimizer:
            continue
        elif one.ddp_config.use_megatron_fsdp:
            problems.append("use_megatron_fsdp: its sharding is not known")
        elif one.ddp_config.num_distributed_optimizer_instances > 1:
            problems.append("num_distributed_optimizer_instances > 1: several ranks would publish each range")
        elif type(inner).__name__ == "HybridDeviceOptimizer":
            problems.append("optimizer_cpu_offload: the step ends after its hooks")
        elif not isinstance(inner, Optimizer):
            problems.append(f"{type(inner).__name__} is not a torch optimizer")
        else:
            found.append(one)
    if problems:
        raise OptimizerRefused(
            "this Megatron-Core optimizer cannot be followed: " + "; ".join(dict.fromkeys(problems)),
            hint="docs/trainers.md lists what is supported",
        )
    return found


def _chunk(module: nn.Module) -> Chunk:
    """Raises MappingMismatch if it is no GPTModel, or its layers do not follow each other."""
    gpt: Any = module
    while isinstance(getattr(gpt, "module", None), nn.Module):
        gpt = gpt.module
    if not any(kind.__name__ == "GPTModel" for kind in type(gpt).__mro__):
        raise MappingMismatch(
            f"{type(gpt).__name__} is not Megatron-Core's GPTModel",
            hint="docs/trainers.md lists the models that are mapped",
        )
    numbers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
    first = numbers[0] if numbers else 0
    if numbers != list(range(first, first + len(numbers))):
        raise MappingMismatch(
            f"the layers of a model chunk are numbers {numbers}, and do not follow each other"
        )
    groups = gpt.pg_collection
    tp, ep, etp = (_place_in(getattr(groups, name, None)) for name in ("tp", "ep", "expt_tp"))
    return Chunk(gpt, Coordinates(tp, ep, etp, first))


def _kind(chunk: Chunk) -> str:
    """For people."""
    groups, at = chunk.gpt.pg_collection, chunk.at
    sizes = {"TP": at.tp[1], "PP": _place_in(groups.pp)[1], "EP": at.ep[1], "expert TP": at.etp[1]}
    return f"Megatron-Core ({', '.join(f'{name} {size}' for name, size in sizes.items())})"


def _place_in(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def _architecture(gpt: Any, checkpoint: Checkpoint | None) -> Architecture:
    if checkpoint is None:
        raise ConfigError(
            "a Megatron-Core model pads its vocabulary, and does not know how many rows its checkpoint has",
            hint="name the Hugging Face folder that the run started from as base_checkpoint",
        )
    if EMBEDDING not in checkpoint.tensors:
        raise MappingMismatch(
            f"base checkpoint {checkpoint.directory} has no {EMBEDDING}",
            hint="docs/trainers.md lists the models that are mapped",
        )
    return read_architecture(
        gpt.config,
        vocab=checkpoint.tensors[EMBEDDING].shape[0],
        padded_vocab=gpt.vocab_size,
        tied=gpt.share_embeddings_and_output_weights,
    )


def _meta(model: Architecture, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    named = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in model.tensors().items()}
    if model.tied:
        named[HEAD] = named[EMBEDDING]
    return named


def _ranges(optimizer: Any) -> Iterator[Range]:
    """What this rank steps, as DistributedOptimizer has it now."""
    groups = (
        (
            optimizer.model_float16_groups,
            optimizer.shard_fp32_from_float16_groups,
            optimizer.shard_float16_groups,
        ),
        (
            optimizer.model_fp32_groups,
            [[None] * len(g) for g in optimizer.shard_fp32_groups],
            optimizer.shard_fp32_groups,
        ),
    )
    for kind in groups:
        for group in zip(*kind, strict=True):
            for parameter, master, own in zip(*group, strict=True):
                found = optimizer._get_model_param_range_map(parameter)["param"]
                yield Range(
                    parameter, found.start, found.end, own if master is None else master, master is not None
                )


def _pieces(found: Range, local: Local) -> Iterator[Piece]:
    for whole in local.runs:
        for run in whole.within(found.start, found.stop):
            if run.name is None or run.region is None:
                continue
            size = run.region.size
            view = View(run.start - found.start, size, _row_major(size))
            yield Piece(
                run.name,
                _part(found.parameter, run.start, size),
                run.region.start,
                run.region.stride,
                key=id(found.stepped),
                view=view,
                master=view.of(found.stepped) if found.master else None,
            )


def _part(parameter: torch.Tensor, start: int, size: tuple[int, ...]) -> torch.Tensor:
    """Elements of a parameter from `start` on, live, in a shape."""
    return parameter.detach().view(-1)[start : start + prod(size)].view(size)


def _row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(size[i + 1 :]) for i in range(len(size)))
