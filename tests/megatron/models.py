"""Megatron-Core's models of a Hugging Face checkpoint, as one rank of a layout has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from tests.megatron import cpu  # isort: skip  # before anything of Megatron
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tests.support.megatron_slices import Sizes, Stage, Tensors, sliced

__all__ = ["Chunk", "Layout", "begin", "cpu", "load", "make", "padded", "read", "sizes_of"]


@dataclass(frozen=True)
class Layout:
    """How many ranks there are, and of each kind of parallelism. `etp`: tensor parallelism within experts.

    `chunks`: of the model per pipeline stage; several: the interleaved schedule. `overlap`: ranks get each other's
    updated parameters only with the next forward pass. `fp32`: parameters without masters.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1
    overlap: bool = False
    fp32: bool = False


def begin(layout: Layout) -> None:
    """Make Megatron's process groups. Collective; torch.distributed is there."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    model_parallel_cuda_manual_seed(1234)


def read(folder: Path) -> tuple[Any, Tensors]:
    """Config and tensors of a checkpoint."""
    (file,) = folder.glob("*.safetensors")
    return AutoConfig.from_pretrained(folder), load_file(file)


@dataclass(frozen=True)
class Chunk:
    """A part of the model, and where it belongs."""

    stage: Stage
    gpt: nn.Module


def _config(hf: Any, layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    experts = getattr(hf, "num_experts", None)
    moe: dict[str, Any] = {}
    if experts:
        moe = {
            "num_moe_experts": experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "sequence_parallel": layout.tp > 1,
        }
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type.startswith("qwen3"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=False,
        **moe,
    )


def make(hf: Any, layout: Layout, dtype: torch.dtype) -> tuple[TransformerConfig, list[Chunk]]:
    """This rank's parts of the model, in eager torch."""
    config = _config(hf, layout, dtype)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    chunks = []
    for number in range(layout.chunks):
        vp = number if layout.chunks > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp)
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded(hf.vocab_size, layout.tp),
            max_sequence_length=64,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=hf.rope_parameters["rope_theta"],
            vp_stage=vp,
        )
        offset = get_transformer_layer_offset(config, vp_stage=vp)
        layers = range(offset, offset + hf.num_hidden_layers // (layout.pp * layout.chunks))
        stage = Stage(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
            layers,
            first,
            last,
        )
        chunks.append(Chunk(stage, gpt))
    return config, chunks


def padded(vocab: int, tp: int) -> int:
    """As Megatron's own tokenizers do."""
    return -(-vocab // (128 * tp)) * 128 * tp


def sizes_of(hf: Any, layout: Layout) -> Sizes:
    experts = getattr(hf, "num_experts", None)
    moe = frozenset(range(hf.num_hidden_layers) if experts else ())
    return Sizes(
        hf.num_key_value_heads, padded(hf.vocab_size, layout.tp), hf.tie_word_embeddings, moe, experts or 1,
        layout.tp, layout.ep, layout.etp,
    )  # fmt: skip


def load(chunk: Chunk, full: Mapping[str, torch.Tensor], sizes: Sizes) -> None:
    """Fill a chunk's parameters, all of them, from a checkpoint's tensors by plain slicing."""
    local = sliced(full, sizes, chunk.stage)
    parameters = dict(chunk.gpt.named_parameters())
    assert parameters.keys() == local.keys(), parameters.keys() ^ local.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert parameter.shape == local[name].shape, name
            parameter.copy_(local[name])
