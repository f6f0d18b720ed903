"""The map from Megatron-Core's parameters to the checkpoint: any sizes, any layout, against plain slicing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore.regions import Region, indices_at
from manifest.tiling import tiling_problems
from publisher.adapters.megatron_geometry import Architecture, Coordinates, Local, Run, place_all
from publisher.errors import MappingMismatch
from tests.support.megatron_slices import Sizes, Stage, Tensors, exported, sliced


@dataclass(frozen=True)
class Layout:
    """A model and all the ranks that hold it once."""

    model: Architecture
    sizes: Sizes
    stages: tuple[Stage, ...]

    def at(self, stage: Stage) -> Coordinates:
        sizes = self.sizes
        return Coordinates(
            (stage.tp, sizes.tp), (stage.ep, sizes.ep), (stage.etp, sizes.etp), stage.layers.start
        )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    tp, ep, etp, pp = number(1, 4), number(1, 3), number(1, 2), number(1, 3)
    groups = tp * number(1, 2) if draw(st.booleans()) or tp == 1 else draw(st.sampled_from(_divisors(tp)))
    heads = groups * number(1, 3) * (tp // groups if groups < tp else 1)
    layers = pp - 1 + number(1, 3)
    experts = ep * number(1, 3)
    moe = frozenset(draw(st.sets(st.integers(0, layers - 1)))) if draw(st.booleans()) else frozenset()
    vocab = number(1, 20)
    tied = draw(st.booleans())
    head_dim = tp * number(1, 2) if groups < tp else number(1, 3)
    model = Architecture(
        layers=layers, hidden=number(1, 5), ffn=tp * number(1, 3), heads=heads, groups=groups, head_dim=head_dim,
        vocab=vocab, padded_vocab=-(-vocab // (4 * tp)) * 4 * tp, tied=tied, qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()), experts=experts, moe_ffn=etp * number(1, 3), moe_layers=moe,
    )  # fmt: skip
    sizes = Sizes(groups, model.padded_vocab, tied, moe, experts, tp, ep, etp)
    cuts = (
        sorted(draw(st.sets(st.integers(1, layers - 1), min_size=pp - 1, max_size=pp - 1))) if pp > 1 else []
    )
    engine = draw(st.booleans())
    stages = [
        Stage(t, e, et, range(low, high), low == 0, high == layers, engine)
        for low, high in pairwise([0, *cuts, layers])
        for t, e, et in product(range(tp), range(ep), range(etp))
    ]
    return Layout(model, sizes, tuple(stages))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n) if n % d == 0]


def numbered(model: Architecture) -> Tensors:
    """The checkpoint with a number of its own in every element."""
    full, first = {}, 0
    for name, shape in model.tensors().items():
        numel = torch.Size(shape).numel()
        full[name] = torch.arange(first, first + numel).view(shape)
        first += numel
    return full


def read(full: Tensors, run: Run) -> torch.Tensor:
    """What the map says `run` holds."""
    if run.name is None or run.region is None:
        return torch.full((run.numel,), -1)
    indices = indices_at(run.region, torch.arange(run.numel).numpy())
    return full[run.name].reshape(-1)[torch.from_numpy(indices)]


def mapped(layout: Layout, full: Tensors) -> Iterator[tuple[Stage, dict[str, Local], Tensors]]:
    for stage in layout.stages:
        local = sliced(full, layout.sizes, stage)
        named = {name: tuple(tensor.shape) for name, tensor in local.items()}
        yield stage, place_all(named, layout.model, layout.at(stage)), local


@given(layouts())
@settings(deadline=None)
def test_every_element_is_where_plain_slicing_puts_it(layout: Layout) -> None:
    full = numbered(layout.model)
    for _, places, locals_ in mapped(layout, full):
        assert places.keys() == locals_.keys()
        for name, local in places.items():
            found = torch.cat([read(full, run) for run in local.runs])
            assert torch.equal(found, locals_[name].reshape(-1)), name
            edges = [0, *(run.start + run.numel for run in local.runs)]
            assert [run.start for run in local.runs] == edges[:-1]


@given(layouts())
@settings(deadline=None)
def test_slices_put_together_are_the_checkpoint(layout: Layout) -> None:
    """The oracle's own two halves."""
    full = numbered(layout.model)
    ranks = [(stage, sliced(full, layout.sizes, stage)) for stage in layout.stages]
    again = exported(ranks, layout.sizes, layout.model.vocab)
    assert again.keys() == full.keys()
    assert all(torch.equal(again[name], full[name]) for name in full)


@given(layouts(), st.data())
@settings(deadline=None)
def test_all_ranks_tile_every_tensor_once(layout: Layout, data: st.DataObject) -> None:
    """With each parameter cut at random among data-parallel ranks, as Megatron's buffers do."""
    full = numbered(layout.model)
    owned: dict[str, list[Region]] = {name: [] for name in full}
    padding = 0
    for stage, places, locals_ in mapped(layout, full):
        for name, local in places.items():
            dense = ".experts." not in name
            if local.copy or (dense and (stage.ep or stage.etp)) or (not dense and stage.tp):
                continue  # in these tests every rank is there for every combination of its numbers
            numel = locals_[name].numel()
            cuts = sorted(data.draw(st.sets(st.integers(0, numel), max_size=2)))
            for low, high in pairwise([0, *cuts, numel]):
                for run in (part for whole in local.runs for part in whole.within(low, high)):
                    assert low <= run.start < run.start + run.numel <= high
                    assert torch.equal(read(full, run), locals_[name].reshape(-1)[run.start :][: run.numel])
                    if run.name is None or run.region is None:
                        padding += run.numel
                    else:
                        owned[run.name].append(run.region)
    for name, regions in owned.items():
        assert not tiling_problems(full[name].numel(), regions, ["a rank"] * len(regions)), name
    rows = (1 if layout.model.tied else 2) * (layout.model.padded_vocab - layout.model.vocab)
    assert padding == rows * layout.model.hidden


MODEL = Architecture(
    layers=2, hidden=4, ffn=6, heads=4, groups=2, head_dim=2, vocab=5, padded_vocab=8, experts=4, moe_ffn=2,
    moe_layers=frozenset([1]),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("decoder.layers.0.self_attention.linear_q_down_proj.weight", (2, 4), "is not known"),
        ("decoder.layers.1.mlp.experts.weight1", (4, 16), "is not known"),
        ("decoder.layers.1.mlp.shared_experts.linear_fc1.weight", (4, 4), "is not known"),
        ("embedding.position_embeddings.weight", (8, 4), "is not known"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (18, 4), r"has shape \(18, 4\), not \(16, 4\)"),
        (
            "decoder.layers.0.self_attention.q_layernorm.weight",
            (2,),
            "q_norm.weight, which the model does not",
        ),
        (
            "decoder.layers.1.mlp.linear_fc1.weight",
            (12, 4),
            "gate_proj.weight.*which the model does not have",
        ),
        ("decoder.layers.2.input_layernorm.weight", (4,), "layers.2.*which the model does not have"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight4", (4, 4), "not one of the experts of rank 0"),
    ],
)
def test_what_has_no_place_is_named(name: str, shape: tuple[int, ...], problem: str) -> None:
    with pytest.raises(MappingMismatch, match=problem):
        place_all({name: shape}, MODEL, Coordinates())


def test_all_offenders_are_named() -> None:
    named: dict[str, Any] = {"a.weight": (1,), "decoder.final_layernorm.weight": (4,), "b.weight": (1,)}
    with pytest.raises(MappingMismatch, match=r"a\.weight is not known; b\.weight is not known"):
        place_all(named, MODEL, Coordinates())


def test_sizes_that_ranks_cannot_share_are_named() -> None:
    named: dict[str, Any] = {"decoder.layers.0.mlp.linear_fc2.weight": (4, 2)}
    with pytest.raises(MappingMismatch, match="6 rows or columns cannot be shared by 4 ranks"):
        place_all(named, replace(MODEL, vocab=8), Coordinates(tp=(0, 4)))


def test_a_whole_matrix_of_one_rank_is_one_region() -> None:
    named: dict[str, Any] = {"decoder.layers.0.self_attention.linear_proj.weight": (4, 8)}
    (local,) = place_all(named, MODEL, Coordinates()).values()
    assert local.runs == (Run(0, 32, "model.layers.0.self_attn.o_proj.weight", Region(0, (32,), (1,))),)
