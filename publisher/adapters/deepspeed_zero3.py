"""DeepSpeed's ZeRO-3: every parameter is cut among all ranks, and its shard is a part of a flat buffer.

Each rank publishes its shards. Sub groups of them have one flat tensor each that the inner optimizer steps: a master,
or where parameters are fp32 the buffer itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import distributed, nn

from manifest.catalog import Catalog
from publisher.adapters.base import Piece, View, same_bits
from publisher.adapters.groupwise import REPORT, SUPPORTED, GroupwiseAdapter
from publisher.adapters.lora import Lora, select
from publisher.adapters.plain import Stepped
from publisher.adapters.ranks import Ranks
from publisher.errors import MappingMismatch, OptimizerRefused

_KIND: Final = "DeepSpeedZeroOptimizer_Stage3"


class Zero3Adapter(GroupwiseAdapter):
    """`optimizer`: DeepSpeed's own, as deepspeed.initialize returned it. `model`: the engine, or what it trains.

    A parameter in it is empty: `ds_shape` is its shape, `ds_tensor` this rank's shard, whole ones that are gathered
    or persistent are copies. What is no such parameter (buffers) every rank has whole. `lora`: as in publisher.yaml.

    Raises OptimizerRefused, MappingMismatch, ConfigError.
    """

    def __init__(self, model: nn.Module, optimizer: Any, ranks: Ranks, lora: Lora | None) -> None:
        _check_followed(optimizer, ranks)
        inner = [optimizer.optimizer]
        if optimizer.offload_optimizer and optimizer.partial_offload != 1.0:
            inner.append(optimizer.backup_optimizer)  # steps what stays on the accelerator
        flats = optimizer.fp32_partitioned_groups_flat
        stepped = zip(optimizer.fp16_groups, flats, strict=True)
        masters = [(parameter, flat) for group, flat in stepped for parameter in group]
        selection = select(model, inner, masters, lora, None)
        super().__init__(model, inner, (), ranks, selection=selection)
        self.check_belongs(parameter for parameter, _ in masters)
        self._zero, self.ranks = optimizer, ranks.size
        groups = [
            optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[i]] for i in range(len(flats))
        ]
        # An inner optimizer has them in its groups only while it steps them.
        self._stepped = {
            id(flat): Stepped(flat, optimizer.optimizer, group)
            for flat, group in zip(flats, groups, strict=True)
        }
        self.kind = f"DeepSpeed ZeRO-3 ({type(optimizer.optimizer).__name__})" + selection.kind

    def named(self) -> Mapping[str, torch.Tensor]:
        """See `Adapter`. Parameters are on the meta device; tied ones are one there, too."""
        whole: dict[int, torch.Tensor] = {}
        live: Mapping[str, Any] = super().named()
        for tensor in filter(_is_cut, live.values()):
            shape = torch.empty(tensor.ds_shape, dtype=tensor.ds_tensor.dtype, device="meta")
            whole.setdefault(id(tensor), shape)
        return {name: whole.get(id(tensor), tensor) for name, tensor in live.items()}

    def pieces(self, catalog: Catalog) -> list[Piece]:
        """See `Adapter`."""
        if not self._zero.fp16_partitioned_groups_flat:
            raise MappingMismatch(
                "DeepSpeed has offloaded its 16-bit shards (lp_params), and may show others in their place meanwhile",
                hint="attach and publish before engine.offload_states, or after engine.reload_states",
            )
        self.look()
        live = super().named()
        return [piece for spec in catalog.tensors for piece in self.pieces_of(spec.name, live[spec.name])]

    def buffers(self) -> Sequence[torch.Tensor]:
        """See `GroupwiseAdapter`."""
        found: list[torch.Tensor] = self._zero.fp16_partitioned_groups_flat
        return found

    def pieces_of(self, name: str, tensor: Any) -> Iterator[Piece]:
        """See `PlainAdapter`."""
        if not _is_cut(tensor):
            yield from super().pieces_of(name, tensor)
            return
        start, count = _cut(tensor.ds_numel, tensor.partition_numel(), self._ranks.rank)
        if count:
            shard = tensor.ds_tensor.detach()[:count]
            yield Piece(name, shard, start, **self._stepping_of(name, tensor, count))

    def replicas(self, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
        """See `Adapter`."""
        live, own = super().named(), (self._ranks.rank,)
        return [own if _is_cut(live[piece.name]) else self.everyone for piece in pieces]

    def problems(self, catalog: Catalog) -> list[str]:
        """See `Adapter`: what this rank holds must be what DeepSpeed's own gathering puts in its place, bit for bit,
        must lie in its flat buffer where its master lies in the other, and must be that, rounded.

        One parameter at a time is gathered whole on every rank.
        """
        strange = self._ranks.strange(catalog)
        if strange:  # to gather tensors one by one, all ranks have to have the same
            return strange
        live, own = super().named(), []
        self._zero.checkpoint_event_prologue()  # nothing is whole but what is gathered here
        for spec in catalog.tensors:
            tensor = live[spec.name]
            if _is_cut(tensor):
                pieces = list(self.pieces_of(spec.name, tensor))
                own += [text for piece in pieces for text in self._misplaced(tensor, piece)]
                own += _unlike_gathered(tensor, pieces)
        self._zero.checkpoint_event_epilogue()
        return self._compared(own, catalog)

    def _copies(self, catalog: Catalog) -> dict[str, int]:
        return {}  # a shard is one rank's alone

    def _stepping_of(self, name: str, tensor: Any, count: int) -> dict[str, Any]:
        """The fields of a Piece, the first `count` elements of this rank's shard, that tell what steps them.

        Raises MappingMismatch.
        """
        place = self._zero.grad_position.get(self._zero.get_param_id(tensor))
        if place is None:  # frozen, or in no optimizer
            return {}
        group, start, _ = place
        flat = self._zero.fp32_partitioned_groups_flat[group]
        if start + count > flat.numel():
            raise MappingMismatch(
                f"{count} elements of {name} from {start} on are more than the {flat.numel()} of sub group {group}",
                hint=REPORT,
            )
        view = View(start, (count,), (1,))
        alike = _memory(flat) == _memory(tensor.ds_tensor)
        return {"key": id(flat), "view": view, "master": None if alike else view.of(flat)}

    def _misplaced(self, tensor: Any, piece: Piece) -> list[str]:
        if piece.view is None:
            return []
        group, _, _ = self._zero.grad_position[self._zero.get_param_id(tensor)]
        there = piece.view.of(self._zero.fp16_partitioned_groups_flat[group])
        if there.data_ptr() != piece.tensor.data_ptr():
            return [f"{piece.name} does not lie in sub group {group} where its master does"]
        if piece.master is not None and not same_bits(piece.tensor, piece.master.to(piece.tensor.dtype)):
            return [f"{piece.name} differs from its master, which the next step would copy to it"]
        return []


def _check_followed(optimizer: Any, ranks: Ranks) -> None:
    """Raises OptimizerRefused, naming all that has no map here."""
    problems = []
    if type(optimizer).__name__ != _KIND:
        problems.append(f"{type(optimizer).__name__} is not {_KIND} itself, and may step elsewhere")
    for reason, found in {
        "zenflow: some channels are stepped apart, and without hooks": optimizer.zenflow,
        "offload_optimizer to nvme: masters are in memory only while they are stepped": optimizer.swap_optimizer,
        "offload_param to nvme: parameters are in memory only while they are used": optimizer.params_in_nvme_and_cpu,
        "zero_hpz_partition_size > 1: a second copy of the shards": optimizer.zero_hpz_partition_size > 1,
        "zero_quantized_weights: ranks compute with other values than they hold": (
            optimizer.parameter_offload.zero_quantized_weights
        ),
        "zero_quantized_nontrainable_weights: frozen parameters are held quantized": (
            optimizer.zero_quantized_nontrainable_weights
        ),
    }.items():
        if found:
            problems.append(reason)
    problems += _cut_otherwise(optimizer, ranks)
    if problems:
        raise OptimizerRefused(
            "this DeepSpeed optimizer cannot be followed: " + "; ".join(problems), hint=SUPPORTED
        )


def _cut_otherwise(optimizer: Any, ranks: Ranks) -> list[str]:
    """Parameters that are cut among other ranks than those that attach, as experts and model parallel ones are."""
    wanted = distributed.get_process_group_ranks(None if ranks.writer is None else ranks.writer.group)
    problems: dict[str, str] = {}
    for name, tensor in optimizer.module.named_parameters():
        if _is_cut(tensor):
            found = distributed.get_process_group_ranks(tensor.ds_process_group)
            if found != wanted:
                problems.setdefault(
                    str(found), f"{name} is cut among ranks {found}, and not among those that attach"
                )
    return list(problems.values())


def _is_cut(tensor: Any) -> bool:
    """Whether it is a parameter that DeepSpeed has cut among the ranks."""
    return hasattr(tensor, "ds_id")


def _cut(numel: int, each: int, rank: int) -> tuple[int, int]:
    """First of `numel` elements in a rank's shard, and how many are in it; the rest of the `each` there is padding."""
    start = min(rank * each, numel)
    return start, min(each, numel - start)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unlike_gathered(tensor: Any, pieces: Sequence[Piece]) -> list[str]:
    """Whether DeepSpeed gathers something else. Collective."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(tensor):
        whole = tensor.detach().reshape(-1)
        out = []
        for piece in pieces:
            if piece.region.last >= len(whole):
                out.append(f"{piece.name} would reach element {piece.region.last} of {len(whole)}")
                continue
            wanted = whole[piece.start : piece.start + piece.tensor.numel()]
            if not same_bits(wanted, piece.tensor):
                out.append(f"{piece.name} holds other values than DeepSpeed gathers in its place")
        return out
