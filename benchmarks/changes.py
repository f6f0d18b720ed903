"""Change sets to measure on: random masks with differences as in training, and versions of a model in training."""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.formats import U16, Change
from chunkstore import difference

_STEP = 0.87  # share of differences of ±1 among weights that an AdamW step at an RL learning rate changes
_CONTEXT = 128
_BATCH = 4
_SETTLE = 10  # steps at the final learning rate before anything is recorded


def random_mask(density: float, elements: int = 1 << 24, columns: int = 4096) -> Change:
    """Normal weights, each changed independently with probability `density`, by a few representable values."""
    rng = np.random.default_rng(0)
    old = ((rng.normal(0, 0.02, elements).astype(np.float32).view(np.uint32)) >> 16).astype(np.uint16)
    at = np.flatnonzero(rng.random(elements) < density)
    steps = rng.geometric(_STEP, len(at)).astype(np.uint16)
    new = old.copy()
    new[at] = difference.add(old[at], np.where(rng.random(len(at)) < 0.5, steps, -steps))
    return Change(old, new, at, columns)


def recorded(lr: float, warmup: int, versions: Sequence[int]) -> Iterator[list[Change]]:
    """One change set for each of `versions`, of that many optimizer steps, of a Qwen3 model of 14 M parameters.

    It learns the source of the Python standard library, byte by byte: `warmup` steps at 1e-3, so that weights and
    moments look like those of a model that has learned something, then at `lr`. All on the CPU.
    """
    torch.manual_seed(0)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    text = _text()
    generator = torch.Generator().manual_seed(0)
    for _ in range(warmup):
        _train(model, optimizer, text, generator)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for _ in range(_SETTLE):
        _train(model, optimizer, text, generator)
    for steps in versions:
        before = [_bits(parameter) for parameter in model.parameters()]
        for _ in range(steps):
            _train(model, optimizer, text, generator)
        after = [_bits(parameter) for parameter in model.parameters()]
        columns = [parameter.shape[-1] for parameter in model.parameters()]
        yield [
            Change(old, new, np.flatnonzero(old != new), width)
            for old, new, width in zip(before, after, columns, strict=True)
        ]


def _model() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=256,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
    )
    model: nn.Module = Qwen3ForCausalLM(config)
    return model


def _text() -> torch.Tensor:
    """The bytes of the standard library's own modules, about 10 MB."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(data, dtype=torch.uint8)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor, generator: torch.Generator
) -> None:
    starts = torch.randint(0, len(text) - _CONTEXT, (_BATCH,), generator=generator)
    batch = text[starts[:, None] + torch.arange(_CONTEXT)].long()
    optimizer.zero_grad()
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()


def _bits(parameter: nn.Parameter) -> U16:
    cast = parameter.detach().reshape(-1).to(torch.bfloat16)
    bits: U16 = cast.view(torch.int16).numpy().view(np.uint16)
    return bits
