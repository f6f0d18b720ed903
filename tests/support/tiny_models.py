"""Tiny Hugging Face checkpoints of the architectures that real engines serve, for trainers and engines alike."""

from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY: Final = 512

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # not the number of heads: the fused projection has parts of two sizes
    "head_dim": 32,  # not hidden size / heads
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_qwen3(folder: Path, *, seed: int, tied: bool = False, **shape: Any) -> Path:
    """Write a dense Qwen3 of random bf16 weights into `folder`; `shape` overrides fields of its config."""
    config = Qwen3Config(**{**_SHAPE, "tie_word_embeddings": tied, **shape})
    return _save(folder, seed, Qwen3ForCausalLM, config)


def save_qwen2(folder: Path, *, seed: int, tied: bool = False, **shape: Any) -> Path:
    """Write a Qwen2, whose query, key and value projections have biases."""
    config = Qwen2Config(**{**_SHAPE, "head_dim": 16, "tie_word_embeddings": tied, **shape})
    return _save(folder, seed, Qwen2ForCausalLM, config)


def save_llama(folder: Path, *, seed: int, tied: bool = False, **shape: Any) -> Path:
    """Write a Llama."""
    config = LlamaConfig(**{**_SHAPE, "tie_word_embeddings": tied, **shape})
    return _save(folder, seed, LlamaForCausalLM, config)


def save_deepseek(folder: Path, *, seed: int, **shape: Any) -> Path:
    """Write a DeepSeek-V3: latent attention, a dense layer and one of 8 experts in 2 groups and a shared one."""
    latent = {
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    config = DeepseekV3Config(**{**_SHAPE, "tie_word_embeddings": False, **latent, **shape})
    return _save(folder, seed, DeepseekV3ForCausalLM, config)


def save_qwen3_moe(folder: Path, *, seed: int, **shape: Any) -> Path:
    """Write a Qwen3-MoE, 2 of 8 experts active per token; its checkpoint names each expert's tensors apart."""
    moe = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    config = Qwen3MoeConfig(**{**_SHAPE, "tie_word_embeddings": False, **moe, **shape})
    return _save(folder, seed, Qwen3MoeForCausalLM, config)


def _save(folder: Path, seed: int, architecture: Any, config: PreTrainedConfig) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _randomize(name, parameter)
    model.to(torch.bfloat16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, buffer in model.named_buffers():
            if name.endswith(
                "e_score_correction_bias"
            ):  # the one tensor that DeepSeek's checkpoints keep in fp32
                buffer.data = torch.randn(buffer.shape)
    model.save_pretrained(folder)
    return folder


def _randomize(name: str, parameter: nn.Parameter) -> None:
    """Far enough from each other and from zero that logits tell any two models, tensors and rows apart."""
    if parameter.ndim == 1:  # norms, all ones as they are initialized
        parameter.normal_(1.0, 0.1)
    elif "embed_tokens" in name:
        parameter.normal_(0.0, 1.0)
    else:
        parameter.normal_(0.0, 0.2)
