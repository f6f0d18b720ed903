"""Where Megatron-Core's parameters lie in the tensors of a Hugging Face checkpoint.

Pure geometry: from the sizes of the model, the rank's coordinates, a parameter's name and its local shape. No Megatron,
no process groups. Qwen2, Qwen3, Llama and Qwen3-MoE; names of the local and of the Transformer Engine layer specs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from chunkstore.regions import Region, cut
from publisher.errors import MappingMismatch

Shape = tuple[int, ...]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_(fc[12])\.weight|linear_(fc[12])\.weight(\d+))"
)
_ALIKE: Final = {  # every TP rank has all of it
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


@dataclass(frozen=True)
class Architecture:
    """Sizes of the whole model. `vocab`: rows of the checkpoint's embedding; Megatron pads them to `padded_vocab`.

    `moe_layers`: numbers of the layers whose MLP is `experts` experts of `moe_ffn`.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    padded_vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    moe_ffn: int = 0
    moe_layers: frozenset[int] = frozenset()

    def tensors(self) -> dict[str, Shape]:
        """The checkpoint's tensors by name; a tied `lm_head.weight` is not one."""
        found: dict[str, Shape] = {EMBEDDING: (self.vocab, self.hidden), "model.norm.weight": (self.hidden,)}
        if not self.tied:
            found[HEAD] = (self.vocab, self.hidden)
        for layer in range(self.layers):
            for name, shape in self._layer(layer):
                found[f"model.layers.{layer}.{name}"] = shape
        return found

    def _layer(self, layer: int) -> Iterator[tuple[str, Shape]]:
        q, kv = self.heads * self.head_dim, self.groups * self.head_dim
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"self_attn.{name}_proj.weight", (rows, self.hidden)
            if self.qkv_bias:
                yield f"self_attn.{name}_proj.bias", (rows,)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "self_attn.o_proj.weight", (self.hidden, q)
        yield "input_layernorm.weight", (self.hidden,)
        yield "post_attention_layernorm.weight", (self.hidden,)
        if layer in self.moe_layers:
            yield "mlp.gate.weight", (self.experts, self.hidden)
            for expert in range(self.experts):
                yield from _mlp(f"mlp.experts.{expert}.", self.moe_ffn, self.hidden)
        else:
            yield from _mlp("mlp.", self.ffn, self.hidden)


def _mlp(prefix: str, ffn: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield prefix + "gate_proj.weight", (ffn, hidden)
    yield prefix + "up_proj.weight", (ffn, hidden)
    yield prefix + "down_proj.weight", (hidden, ffn)


@dataclass(frozen=True)
class Coordinates:
    """A rank's place: tensor parallel, expert parallel, tensor parallel within experts; (number, size) of each.

    `first_layer`: the model's number of `decoder.layers.0` here, by pipeline stage.
    """

    tp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)
    first_layer: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """`numel` elements of a local parameter from flat index `start` on are, in order, `region` of tensor `name`.

    `name`, `region`: None for padding.
    """

    start: int
    numel: int
    name: str | None = None
    region: Region | None = None

    def within(self, start: int, stop: int) -> Iterator["Run"]:
        """What of it lies between `start` and `stop` of the local parameter."""
        first, last = max(start, self.start), min(stop, self.start + self.numel)
        if first >= last:
            return
        if self.region is None:
            yield Run(first, last - first)
            return
        for part in cut(self.region, first - self.start, last - self.start):
            yield Run(first, part.numel, self.name, part)
            first += part.numel


@dataclass(frozen=True, slots=True)
class Local:
    """A local parameter: its runs tile it, ascending. `shape`: of the parameter, as the model's sizes make it.

    `shared`: several ranks with other coordinates, or other parameters, have the same elements, and are kept equal by
    Megatron. `copy`: this is not the one of them that counts.
    """

    shape: Shape
    runs: tuple[Run, ...]
    shared: bool = False
    copy: bool = False


def place_all(named: Mapping[str, Shape], model: Architecture, at: Coordinates) -> dict[str, Local]:
    """Every parameter of one model chunk, by its Megatron name (without wrappers' prefixes), with its local shape.

    Raises MappingMismatch naming every one that is not known, or has another shape than the model's sizes make it.
    """
    known, found, problems = model.tensors(), {}, []
    for name, shape in named.items():
        try:
            local = place(name, model, at)
        except MappingMismatch as error:
            problems.append(error.message)
            continue
        strange = sorted({run.name for run in local.runs if run.name is not None} - known.keys())
        if strange:
            problems.append(f"{name} would be {', '.join(strange)}, which the model does not have")
        elif local.shape != tuple(shape):
            problems.append(f"{name} has shape {tuple(shape)}, not {local.shape}")
        found[name] = local
    if problems:
        raise MappingMismatch(
            "parameters of Megatron-Core that have no place in a Hugging Face checkpoint: "
            + "; ".join(problems[:30]),
            hint="docs/trainers.md lists the architectures and options that are mapped",
        )
    return found


def place(name: str, model: Architecture, at: Coordinates) -> Local:
    """Where one parameter lies. Raises MappingMismatch with the name and the reason."""
    if name == "embedding.word_embeddings.weight":
        return _vocabulary(EMBEDDING, model, at, copy=False)
    if name == "output_layer.weight":  # tied: the last stage's own copy, which its gradients keep equal
        return _vocabulary(EMBEDDING if model.tied else HEAD, model, at, copy=model.tied)
    if name == "decoder.final_layernorm.weight":
        return _alike("model.norm.weight", (model.hidden,), at)
    match = _LAYER.fullmatch(name)
    if match is None:
        raise MappingMismatch(f"{name} is not known")
    layer = f"model.layers.{int(match[1]) + at.first_layer}."
    return _of_layer(name, match[2], layer, model, at)


def _of_layer(name: str, rest: str, layer: str, model: Architecture, at: Coordinates) -> Local:
    if rest in _ALIKE:
        shape = (
            (model.head_dim,)
            if rest.endswith(("q_layernorm.weight", "k_layernorm.weight"))
            else (model.hidden,)
        )
        return _alike(
            layer + _ALIKE[rest], (model.experts, *shape) if rest == "mlp.router.weight" else shape, at
        )
    if rest == "self_attention.linear_qkv.weight":
        return _rows(name, _qkv(layer, "weight", model), model.hidden, at.tp)
    if rest == "self_attention.linear_qkv.bias":
        local = _rows(name, _qkv(layer, "bias", model), 1, at.tp)
        return Local(local.shape[:1], local.runs)
    if rest == "self_attention.linear_proj.weight":
        width = model.heads * model.head_dim
        return _columns(name, layer + "self_attn.o_proj.weight", model.hidden, width, at.tp)
    if rest == "mlp.linear_fc1.weight":
        return _rows(name, _gate_up(layer + "mlp.", model.ffn, at.tp[1]), model.hidden, at.tp)
    if rest == "mlp.linear_fc2.weight":
        return _columns(name, layer + "mlp.down_proj.weight", model.hidden, model.ffn, at.tp)
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        raise MappingMismatch(f"{name} is not known")
    return _expert(name, int(expert[1] or expert[4]), expert[2] or expert[3], layer, model, at)


def _expert(name: str, number: int, which: str, layer: str, model: Architecture, at: Coordinates) -> Local:
    rank, size = at.ep
    if model.experts % size or number >= model.experts // size:
        raise MappingMismatch(
            f"{name} is not one of the experts of rank {rank}: {model.experts} on {size} ranks"
        )
    prefix = f"{layer}mlp.experts.{rank * (model.experts // size) + number}."
    if which == "fc1":
        return _rows(name, _gate_up(prefix, model.moe_ffn, at.etp[1]), model.hidden, at.etp)
    return _columns(name, prefix + "down_proj.weight", model.hidden, model.moe_ffn, at.etp)


_Segment = tuple[str | None, int, int]
"""Consecutive rows of a fused matrix: tensor (None: padding), first row there, number of rows."""


def _vocabulary(tensor: str, model: Architecture, at: Coordinates, *, copy: bool) -> Local:
    segments: list[_Segment] = [(tensor, 0, model.vocab), (None, 0, model.padded_vocab - model.vocab)]
    local = _rows(tensor, segments, model.hidden, at.tp)
    return Local(local.shape, local.runs, shared=model.tied, copy=copy)


def _qkv(layer: str, kind: str, model: Architecture) -> list[_Segment]:
    """Group by group: its queries, its key, its value."""
    d, q = model.head_dim, model.heads // model.groups * model.head_dim
    names = [f"{layer}self_attn.{x}_proj.{kind}" for x in "qkv"]
    return [
        (name, group * rows, rows)
        for group in range(model.groups)
        for name, rows in zip(names, (q, d, d), strict=True)
    ]


def _gate_up(prefix: str, ffn: int, ranks: int) -> list[_Segment]:
    """Rank by rank: its gates, its ups."""
    rows = ffn // ranks
    names = (prefix + "gate_proj.weight", prefix + "up_proj.weight")
    return [(name, rank * rows, rows) for rank in range(ranks) for name in names]


def _rows(name: str, segments: list[_Segment], width: int, at: tuple[int, int]) -> Local:
    """One rank's share of the rows of a fused matrix of `width` columns."""
    rank, ranks = at
    rows = _share(name, sum(count for *_, count in segments), ranks)
    runs, row = [], -rank * rows  # of the segment's first row, here
    for tensor, first, count in segments:
        low, high = max(0, -row), min(count, rows - row)
        if low < high:
            start, numel = (row + low) * width, (high - low) * width
            region = Region.of((first + low) * width, (numel,), (1,))
            runs.append(Run(start, numel, tensor, None if tensor is None else region))
        row += count
    return Local((rows, width), tuple(runs))


def _columns(name: str, tensor: str, rows: int, width: int, at: tuple[int, int]) -> Local:
    """One rank's share of the columns of a matrix."""
    rank, ranks = at
    columns = _share(name, width, ranks)
    region = Region.of(rank * columns, (rows, columns), (width, 1))
    return Local((rows, columns), (Run(0, rows * columns, tensor, region),))


def _alike(tensor: str, shape: Shape, at: Coordinates) -> Local:
    """All TP ranks have the same; the first one's counts."""
    numel = prod(shape)
    run = Run(0, numel, tensor, Region.of(0, (numel,), (1,)))
    return Local(shape, (run,), shared=at.tp[1] > 1, copy=at.tp[0] > 0)


def _share(name: str, whole: int, ranks: int) -> int:
    if whole % ranks:
        raise MappingMismatch(f"{name}: {whole} rows or columns cannot be shared by {ranks} ranks")
    return whole // ranks
