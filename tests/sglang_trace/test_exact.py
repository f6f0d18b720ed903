"""The maps of real models: writing a checkpoint through them equals SGLang's own load of it, in every live bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from chunkstore import digest
from chunkstore.dtypes import bits_dtype
from chunkstore.torch_dtypes import BIT_DTYPES
from manifest.catalog import Catalog
from subscriber.sglang.boxes import BoxMap, Layout
from subscriber.sglang.coverage import coverage
from subscriber.sglang.refusals import refusals
from subscriber.sglang.trace import trace
from tests.sglang_trace.ranks import catalog_of, checkpoint_tensors, leave, live_bytes, load_rank
from tests.support.live_boxes import digests, write
from tests.support.tiny_models import save_deepseek, save_llama, save_qwen2, save_qwen3, save_qwen3_moe

SAVE: Final[dict[str, Callable[..., Path]]] = {
    "qwen2": save_qwen2,
    "qwen2 tied": lambda folder, **k: save_qwen2(folder, tied=True, **k),
    "qwen3": save_qwen3,
    "qwen3 tied": lambda folder, **k: save_qwen3(folder, tied=True, **k),
    "llama": save_llama,
    "llama tied": lambda folder, **k: save_llama(folder, tied=True, **k),
    "qwen3 moe": save_qwen3_moe,
}

ALIASES: Final = {"lm_head.weight": "model.embed_tokens.weight"}


def exact(
    first: Path,
    second: Path,
    catalog: Catalog,
    load: Callable[..., tuple[Any, Any]] = load_rank,
    **parallel: int,
) -> tuple[Layout, list[BoxMap], list[int]]:
    """Trace every rank of a server that holds `first`, write `second` through the maps, and compare.

    Returns the layout, the maps, and how many live elements of each rank are zeros that the loader wrote.
    """
    maps, partials, zeros = [], [], []
    for rank in range(parallel.get("tp", 1)):
        model, args = load(first, rank=rank, **parallel)
        assert load is not load_rank or refusals(model, args) == []
        before = live_bytes(model)
        pointers = [tensor.data_ptr() for tensor in model.parameters()]
        with torch.inference_mode():  # as in a scheduler
            traced = trace(model, catalog)
        assert live_bytes(model) == before
        assert [tensor.data_ptr() for tensor in model.parameters()] == pointers
        found = coverage(model, traced.map, traced.fills)
        assert found.offenders == ()
        assert found.loaded + found.zeros == found.elements
        assert found.elements == sum(p.numel() for p in model.parameters())
        assert BoxMap.from_bytes(traced.map.to_bytes(), catalog) == traced.map
        maps.append(traced.map)
        zeros.append(found.zeros)
        partials.append(digests(model, traced.map, catalog))
        write(model, traced.map, catalog, checkpoint_tensors(second))
        written = live_bytes(model)
        assert written != before
        assert written == live_bytes(load_rank(second, rank=rank, **parallel)[0])
    layout = Layout(catalog, maps)
    check_digests(layout, partials, catalog, checkpoint_tensors(first))
    return layout, maps, zeros


def check_digests(
    layout: Layout, partials: list[list[int]], catalog: Catalog, tensors: dict[str, torch.Tensor]
) -> None:
    """What the owners hold sums to the digests of the files, and replicas equal their owners."""
    for spec, places in zip(catalog.tensors, layout.places, strict=True):
        bits = (
            tensors[spec.name].contiguous().view(BIT_DTYPES[spec.width]).numpy().view(bits_dtype(spec.dtype))
        )
        owned = sum(partials[place.rank][place.box] for place in places if place.owner)
        assert owned % (1 << 64) == digest.digest(spec.name, bits), spec.name
        for place in places:
            if place.replica_of is not None:
                rank, box = place.replica_of
                assert partials[place.rank][place.box] == partials[rank][box]


def pair(tmp_path: Path, save: Callable[..., Path], **shape: Any) -> tuple[Path, Path]:
    leave()
    return save(tmp_path / "a", seed=1, **shape), save(tmp_path / "b", seed=2, **shape)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("architecture", SAVE)
def test_every_live_bit(architecture: str, tp: int, tmp_path: Path) -> None:
    first, second = pair(tmp_path, SAVE[architecture])
    tensors = checkpoint_tensors(first)
    tied = "tied" in architecture
    assert ("lm_head.weight" in tensors) != tied
    _, _, zeros = exact(first, second, catalog_of(tensors, ALIASES if tied else None), tp=tp)
    assert zeros == [0] * tp


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3 tied", "llama"])
def test_padded_vocabulary(architecture: str, tp: int, tmp_path: Path) -> None:
    """500 tokens are padded to 512 rows; the last rank holds the padding, of embedding and head."""
    first, second = pair(tmp_path, SAVE[architecture], vocab_size=500)
    tied = "tied" in architecture
    _, _, zeros = exact(
        first, second, catalog_of(checkpoint_tensors(first), ALIASES if tied else None), tp=tp
    )
    assert zeros == [0] * (tp - 1) + [12 * 64 * (1 if tied else 2)]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3 tied", "qwen3 moe"])
def test_more_ranks_than_key_value_heads(architecture: str, tmp_path: Path) -> None:
    first, second = pair(tmp_path, SAVE[architecture])
    tied = "tied" in architecture
    catalog = catalog_of(checkpoint_tensors(first), ALIASES if tied else None)
    layout, _, _ = exact(first, second, catalog, tp=4)
    heads = layout.places[catalog.ids["model.layers.0.self_attn.k_proj.weight"]]
    assert [(place.rank, place.owner) for place in heads] == [(0, True), (1, False), (2, True), (3, False)]


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_expert_parallel(tp: int, ep: int, tmp_path: Path) -> None:
    first, second = pair(tmp_path, save_qwen3_moe)
    catalog = catalog_of(checkpoint_tensors(first))
    layout, _, _ = exact(first, second, catalog, tp=tp, ep=ep)
    for expert in range(8):
        places = layout.places[catalog.ids[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]]
        assert {place.rank * ep // tp for place in places} == {expert * ep // 8}
        assert len(places) == tp // ep


@pytest.mark.parametrize("tp", [1, 2])
def test_deepseek_without_what_it_derives(tp: int, tmp_path: Path) -> None:
    """DeepSeek-V3 is refused (test_refused) for what it computes from its weights; the weights' own map is exact.

    Its loader joins two checkpoint tensors into one parameter and works in a thread pool.
    """

    def load(checkpoint: Path, **parallel: int) -> tuple[Any, Any]:
        model, args = load_rank(checkpoint, **parallel)
        model.post_load_weights = lambda **_: None  # type: ignore[assignment]
        return model, args

    first, second = pair(tmp_path, save_deepseek)
    catalog = catalog_of(checkpoint_tensors(first))
    layout, maps, _ = exact(first, second, catalog, load, tp=tp)
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        owner = layout.places[catalog.ids[f"model.layers.1.self_attn.{name}.weight"]][0]
        memory = maps[0].memories[maps[0].boxes[owner.box].memory]
        assert memory.name == "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa.weight"


def test_a_tied_catalog_under_its_other_name(tmp_path: Path) -> None:
    """A trainer may call the shared tensor by its other name than SGLang's loader does."""
    first, second = pair(tmp_path, SAVE["qwen3 tied"])
    model, _ = load_rank(first)
    tensors = checkpoint_tensors(first)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    catalog = catalog_of(tensors, {"model.embed_tokens.weight": "lm_head.weight"})
    traced = trace(model, catalog)
    assert coverage(model, traced.map, traced.fills).offenders == ()
    tensors = checkpoint_tensors(second)
    write(model, traced.map, catalog, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert live_bytes(model) == live_bytes(load_rank(second)[0])


def test_a_head_that_sglang_leaves_unset(tmp_path: Path) -> None:
    """SGLang's Qwen3-MoE keeps a head of its own even if the checkpoint is tied, and loads nothing into it.

    The alias in the catalog leads there, so an update brings the head that the trainer has.
    """
    first, second = pair(tmp_path, save_qwen3_moe, tie_word_embeddings=True)
    model, _ = load_rank(first)
    catalog = catalog_of(checkpoint_tensors(first), ALIASES)
    traced = trace(model, catalog)
    assert coverage(model, traced.map, traced.fills).offenders == ()
    write(model, traced.map, catalog, checkpoint_tensors(second))
    written, expected = live_bytes(model), live_bytes(load_rank(second)[0])
    assert written.pop("lm_head.weight") == written["model.embed_tokens.weight"]
    expected.pop("lm_head.weight")
    assert written == expected
