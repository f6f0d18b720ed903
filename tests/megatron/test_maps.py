"""The map against Megatron-Core itself: it fills every parameter so that logits equal those of transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM

from chunkstore.regions import indices_at
from publisher.adapters.megatron_config import read_architecture
from publisher.adapters.megatron_geometry import Coordinates, Local, place_all
from tests.megatron.models import Layout, make, padded, read
from tests.megatron.ranks import ranks
from tests.support.megatron_slices import Tensors
from tests.support.tiny_models import save_llama, save_qwen2, save_qwen3, save_qwen3_moe

VOCABULARY = 503
TOKENS = 16


def fill(layout: Layout, folder: Path) -> None:
    """Fill this rank's parameters through the map, and compare logits where the rank has the last layer."""
    from megatron.core import parallel_state

    hf, full = read(folder)
    config, chunks = make(hf, layout, torch.float32)
    sizes = read_architecture(
        config,
        vocab=hf.vocab_size,
        padded_vocab=padded(hf.vocab_size, layout.tp),
        tied=hf.tie_word_embeddings,
    )
    assert {name: tuple(t.shape) for name, t in full.items()} == sizes.tensors()
    for chunk in chunks:
        stage, parameters = chunk.stage, dict(chunk.gpt.named_parameters())
        at = Coordinates(
            (stage.tp, layout.tp), (stage.ep, layout.ep), (stage.etp, layout.etp), stage.layers.start
        )
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        for name, local in place_all(shapes, sizes, at).items():
            fill_one(parameters[name], local, full)
    if layout.pp > 1:
        return
    tokens = torch.arange(2 * TOKENS).reshape(2, TOKENS) * 29 % VOCABULARY
    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = chunks[0].gpt(tokens, torch.arange(TOKENS)[None].expand(2, -1), mask)
        wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    parts = [torch.empty_like(logits) for _ in range(layout.tp)]
    distributed.all_gather(parts, logits.contiguous(), parallel_state.get_tensor_model_parallel_group())
    found = torch.cat(parts, -1)[..., :VOCABULARY]
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@torch.no_grad()
def fill_one(parameter: torch.Tensor, local: Local, full: Tensors) -> None:
    flat = parameter.view(-1).fill_(float("nan"))
    for run in local.runs:
        values = torch.zeros(run.numel)
        if run.name is not None and run.region is not None:
            indices = indices_at(run.region, torch.arange(run.numel).numpy())
            values = full[run.name].reshape(-1)[torch.from_numpy(indices)].float()
        flat[run.start : run.start + run.numel] = values
    assert not flat.isnan().any()


@pytest.mark.parametrize(
    ("save", "layout"),
    [
        (lambda folder: save_qwen2(folder, seed=1, vocab_size=VOCABULARY, tied=True), Layout(2, tp=2)),
        (lambda folder: save_llama(folder, seed=2, vocab_size=VOCABULARY), Layout(1)),
        (lambda folder: save_qwen3(folder, seed=3, vocab_size=VOCABULARY), Layout(2, tp=2)),
        (lambda folder: save_qwen3(folder, seed=4, vocab_size=VOCABULARY, tied=True), Layout(2, pp=2)),
        (
            lambda folder: save_qwen3(folder, seed=6, vocab_size=VOCABULARY, num_hidden_layers=4),
            Layout(2, pp=2, chunks=2),
        ),
        (lambda folder: save_qwen3_moe(folder, seed=5, vocab_size=VOCABULARY), Layout(2, ep=2)),
        (lambda folder: save_qwen3_moe(folder, seed=7, vocab_size=VOCABULARY), Layout(2, tp=2, etp=2)),
    ],
    ids=[
        "qwen2 tied, TP 2",
        "llama",
        "qwen3, TP 2",
        "qwen3 tied, PP 2",
        "qwen3, PP 2 interleaved",
        "qwen3 moe, EP 2",
        "qwen3 moe, TP 2 in experts too",
    ],
)
def test_filled_through_the_map_it_computes_what_transformers_does(
    save: Callable[[Path], Path], layout: Layout, tmp_path: Path
) -> None:
    with ranks(tmp_path / "meeting", layout, fill, save(tmp_path / "base")):
        pass
