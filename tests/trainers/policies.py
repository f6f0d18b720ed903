"""Small real policies for trainers: what is trained, and what serves it, are one class."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
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


class Small(nn.Module):
    """Two layers, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 6)
        self.down = nn.Linear(6, 16)


class LanguageModel(nn.Module):
    """Returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


class Policy(LanguageModel):
    """A language model, a parameter with a single row, which many ranks cannot share, and a buffer that counts."""

    seen: torch.Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.bias = nn.Parameter(torch.linspace(-0.1, 0.1, 7).reshape(1, 7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(tokens) + self.bias.float().square().sum()


def adapted(seed: int, **options: Any) -> Any:
    """A PEFT model with an adapter of `seed`, fp32 as PEFT makes it, over a base that is always the same."""
    base = policy("base", seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = {"r": 6, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj", "down_proj"]}
        return get_peft_model(base, LoraConfig(**{"init_lora_weights": False} | config | options))


def policy(name: str, seed: int) -> Any:
    """`name`: even, odd (sizes that no two ranks divide; tied embeddings), llama (no norm inside a head), spare (even,
    and a parameter that is never used), lora, or what that adapts, base.
    """
    if name == "lora":
        return adapted(seed, target_modules=r".*_proj")
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
        if name == "base":
            config = Qwen3Config(
                **EVEN, **common, num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False
            )
            return LanguageModel(Qwen3ForCausalLM(config))
        sizes, odd = (ODD, True) if name == "odd" else (EVEN, False)
        heads = 1 if odd else 2
        made = Policy(
            Qwen3ForCausalLM(
                Qwen3Config(**sizes, **common, num_key_value_heads=heads, tie_word_embeddings=odd)
            )
        )
        if name == "spare":
            made.register_parameter("spare", nn.Parameter(torch.ones(5, 3)))
        return made
