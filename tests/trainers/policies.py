"""Small real policies for trainers: what is trained, and what serves it, are one class."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

EVEN = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
}
ODD = {
    "vocab_size": 503,
    "hidden_size": 50,
    "intermediate_size": 101,
    "num_attention_heads": 5,
    "head_dim": 10,
}


class Policy(nn.Module):
    """A language model, a parameter with a single row, which many ranks cannot share, and a buffer that counts."""

    seen: torch.Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.bias = nn.Parameter(torch.linspace(-0.1, 0.1, 7).reshape(1, 7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss + self.bias.float().square().sum()


def policy(name: str, seed: int) -> Policy:
    """`name`: even, odd (sizes that no two ranks divide; tied embeddings), or llama (no norm inside a head)."""
    common: dict[str, Any] = {
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "llama":
            config = LlamaConfig(**EVEN, **common, num_key_value_heads=2, tie_word_embeddings=False)
            return Policy(LlamaForCausalLM(config))
        sizes, odd = (ODD, True) if name == "odd" else (EVEN, False)
        heads = 1 if odd else 2
        return Policy(
            Qwen3ForCausalLM(
                Qwen3Config(**sizes, **common, num_key_value_heads=heads, tie_word_embeddings=odd)
            )
        )
