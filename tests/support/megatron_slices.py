"""How Megatron-Core cuts a Hugging Face checkpoint, and how it is put together again: whole tensors, plain slicing.

Written from Megatron's modules and from public converters, without the maps of `publisher`: their oracle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stage:
    """One rank: its tensor, expert and expert-tensor parallel numbers, and its layers.

    `engine`: with Transformer Engine's names.
    """

    tp: int
    ep: int
    etp: int
    layers: range
    first: bool
    last: bool
    engine: bool = False


@dataclass(frozen=True)
class Sizes:
    """What the cuts depend on. `moe`: layers with `experts` experts. tp, ep, etp: how many ranks there are of each."""

    groups: int
    padded_vocab: int
    tied: bool
    moe: frozenset[int]
    experts: int
    tp: int
    ep: int
    etp: int


def sliced(full: Mapping[str, torch.Tensor], sizes: Sizes, at: Stage) -> Tensors:
    """What one rank holds, by Megatron's names."""
    local: Tensors = {}
    if at.first:
        local["embedding.word_embeddings.weight"] = _vocabulary(full["model.embed_tokens.weight"], sizes, at)
    for number, layer in enumerate(at.layers):
        part = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in full.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        for name, tensor in _layer(part, layer, sizes, at).items():
            local[f"decoder.layers.{number}.{name}"] = tensor
    if at.last:
        local["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not sizes.tied:
            local["output_layer.weight"] = _vocabulary(full["lm_head.weight"], sizes, at)
        elif not at.first:
            local["output_layer.weight"] = _vocabulary(full["model.embed_tokens.weight"], sizes, at)
    return local


def _vocabulary(whole: torch.Tensor, sizes: Sizes, at: Stage) -> torch.Tensor:
    padding = whole.new_full((sizes.padded_vocab - whole.shape[0], whole.shape[1]), -1)
    return torch.cat([whole, padding]).chunk(sizes.tp)[at.tp]


def _layer(part: Tensors, layer: int, sizes: Sizes, at: Stage) -> Tensors:
    out = {"self_attention.linear_proj.weight": part["self_attn.o_proj.weight"].chunk(sizes.tp, dim=1)[at.tp]}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in part:
            q, k, v = (part[f"self_attn.{x}_proj.{kind}"].chunk(sizes.groups) for x in "qkv")
            fused = torch.cat([torch.cat(group) for group in zip(q, k, v, strict=True)])
            out[f"self_attention.linear_qkv.{kind}"] = fused.chunk(sizes.tp)[at.tp]
    for x in "qk":
        if f"self_attn.{x}_norm.weight" in part:
            out[f"self_attention.{x}_layernorm.weight"] = part[f"self_attn.{x}_norm.weight"]
    before, after = "input_layernorm.weight", "pre_mlp_layernorm.weight"
    if at.engine:
        before = "self_attention.linear_qkv.layer_norm_weight"
        after = after if layer in sizes.moe else "mlp.linear_fc1.layer_norm_weight"
    out[before] = part["input_layernorm.weight"]
    out[after] = part["post_attention_layernorm.weight"]
    if layer not in sizes.moe:
        out["mlp.linear_fc1.weight"], out["mlp.linear_fc2.weight"] = _mlp(part, "mlp.", sizes.tp, at.tp)
        return out
    out["mlp.router.weight"] = part["mlp.gate.weight"]
    each = sizes.experts // sizes.ep
    for i in range(each):
        both = _mlp(part, f"mlp.experts.{at.ep * each + i}.", sizes.etp, at.etp)
        for fc, tensor in zip(("fc1", "fc2"), both, strict=True):
            name = f"linear_{fc}.weight{i}" if at.engine else f"local_experts.{i}.linear_{fc}.weight"
            out[f"mlp.experts.{name}"] = tensor
    return out


def _mlp(part: Tensors, prefix: str, ranks: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = (part[f"{prefix}{x}_proj.weight"].chunk(ranks)[rank] for x in ("gate", "up"))
    return torch.cat([gate, up]), part[f"{prefix}down_proj.weight"].chunk(ranks, dim=1)[rank]


def exported(ranks: Sequence[tuple[Stage, Tensors]], sizes: Sizes, vocab: int) -> Tensors:
    """The whole checkpoint, put together from what the ranks hold."""
    full: Tensors = {}
    for start in sorted({s.layers.start for s, _ in ranks}):
        stage = [(s, local) for s, local in ranks if s.layers.start == start]
        dense = [next(local for s, local in stage if s.tp == tp) for tp in range(sizes.tp)]
        _export_ends(full, dense, sizes, vocab)
        for number, layer in enumerate(stage[0][0].layers):
            here, there = f"decoder.layers.{number}.", f"model.layers.{layer}."
            _export_attention(full, dense, here, there, sizes)
            if layer not in sizes.moe:
                _export_mlp(full, dense, here + "mlp.linear_{}.weight", there + "mlp.")
                continue
            full[there + "mlp.gate.weight"] = dense[0][here + "mlp.router.weight"]
            each = sizes.experts // sizes.ep
            for expert in range(sizes.experts):
                ep, i = divmod(expert, each)
                parts = [
                    next(local for s, local in stage if s.ep == ep and s.etp == etp)
                    for etp in range(sizes.etp)
                ]
                name = f"{here}mlp.experts.local_experts.{i}.linear_{{}}.weight"
                if name.format("fc1") not in parts[0]:
                    name = f"{here}mlp.experts.linear_{{}}.weight{i}"
                _export_mlp(full, parts, name, f"{there}mlp.experts.{expert}.")
    return full


def _export_ends(full: Tensors, dense: Sequence[Tensors], sizes: Sizes, vocab: int) -> None:
    for here, there in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        if here in dense[0] and not (sizes.tied and there == "lm_head.weight"):
            full[there] = torch.cat([local[here] for local in dense])[:vocab]
    if "decoder.final_layernorm.weight" in dense[0]:
        full["model.norm.weight"] = dense[0]["decoder.final_layernorm.weight"]


def _export_attention(full: Tensors, dense: Sequence[Tensors], here: str, there: str, sizes: Sizes) -> None:
    proj = torch.cat([local[f"{here}self_attention.linear_proj.weight"] for local in dense], dim=1)
    full[f"{there}self_attn.o_proj.weight"] = proj
    for kind in ("weight", "bias"):
        name = f"{here}self_attention.linear_qkv.{kind}"
        if name in dense[0]:
            fused = torch.cat([local[name] for local in dense])
            grouped = fused.view(sizes.groups, -1, *fused.shape[1:])
            queries = proj.shape[1] // sizes.groups
            head = (grouped.shape[1] - queries) // 2
            q, k, v = torch.split(grouped, [queries, head, head], dim=1)
            for x, tensor in (("q", q), ("k", k), ("v", v)):
                full[f"{there}self_attn.{x}_proj.{kind}"] = tensor.reshape(-1, *fused.shape[1:])
    for x in "qk":
        name = f"{here}self_attention.{x}_layernorm.weight"
        if name in dense[0]:
            full[f"{there}self_attn.{x}_norm.weight"] = dense[0][name]
    for name, names in (
        ("input", ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")),
        ("post_attention", ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")),
    ):
        full[f"{there}{name}_layernorm.weight"] = next(
            dense[0][here + n] for n in names if here + n in dense[0]
        )


def _export_mlp(full: Tensors, parts: Sequence[Tensors], name: str, there: str) -> None:
    both = [part[name.format("fc1")].chunk(2) for part in parts]
    full[there + "gate_proj.weight"] = torch.cat([gate for gate, _ in both])
    full[there + "up_proj.weight"] = torch.cat([up for _, up in both])
    full[there + "down_proj.weight"] = torch.cat([part[name.format("fc2")] for part in parts], dim=1)
