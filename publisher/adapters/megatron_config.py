"""What of a Megatron-Core TransformerConfig decides where weights lie, and what is refused by name."""

from typing import Any, Final

from publisher.adapters.megatron_geometry import Architecture
from publisher.errors import MappingMismatch

_ABSENT: Final = (None, False, 0)

_REFUSED: Final = {
    "multi_latent_attention": "its low-rank projections have no map here",
    "experimental_attention_variant": "its projections have no map here",
    "attention_output_gate": "gates lie between the queries and the keys of linear_qkv",
    "moe_mlp_glu_interleave_size": "gate and up rows of the experts are interleaved",
    "moe_single_grouped_weight": "all experts' weights are one parameter",
    "moe_shared_expert_intermediate_size": "shared experts have no name in a Qwen3-MoE checkpoint",
    "moe_latent_size": "latent projections have no name in a Qwen3-MoE checkpoint",
    "moe_router_enable_expert_bias": "the router's bias has no name in a Qwen3-MoE checkpoint",
    "mtp_num_layers": "multi-token prediction layers have no name in the checkpoint",
    "heterogeneous_block_specs": "layers of different sizes have no map here",
    "is_hybrid_model": "Mamba layers have no map here",
    "use_kitchen": "its linear layers lie otherwise",
    "add_bias_linear": "only linear_qkv may have a bias: use add_qkv_bias",
    "layernorm_zero_centered_gamma": "the norms' weights are stored minus one",
    "rotary_interleaved": "heads are rotated in pairs, in the checkpoint in halves",
    "fp8_param": "parameters are quantized",
    "fp4_param": "parameters are quantized",
}
"""Options that must be absent, and why."""


def read_architecture(config: Any, *, vocab: int, padded_vocab: int, tied: bool) -> Architecture:
    """The sizes of the model that `config`, a TransformerConfig, describes.

    `vocab`: rows of the checkpoint's embedding. `padded_vocab`: of Megatron's, over all ranks. Raises MappingMismatch
    naming every option that is refused, with its reason.
    """
    problems = [
        f"{name}={getattr(config, name)!r}: {reason}"
        for name, reason in _REFUSED.items()
        if getattr(config, name, None) not in _ABSENT
    ]
    if not config.gated_linear_unit:
        problems.append("gated_linear_unit=False: there is no gate projection")
    if config.normalization != "RMSNorm":
        problems.append(f"normalization={config.normalization!r}: only RMSNorm has a map")
    if vocab > padded_vocab:
        problems.append(f"the checkpoint's vocabulary has {vocab} rows, the model's only {padded_vocab}")
    groups = config.num_query_groups or config.num_attention_heads
    if config.num_attention_heads % groups:
        problems.append(f"{config.num_attention_heads} heads cannot be shared by {groups} groups")
    experts = config.num_moe_experts or 0
    moe = _moe_layers(config) if experts else frozenset()
    if problems:
        raise MappingMismatch(
            "this Megatron-Core model has no map to a Hugging Face checkpoint: " + "; ".join(problems),
            hint="docs/trainers.md lists what is mapped; `detect: snapshot` does not help here",
        )
    return Architecture(
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        groups=groups,
        head_dim=config.kv_channels or config.hidden_size // config.num_attention_heads,
        vocab=vocab,
        padded_vocab=padded_vocab,
        tied=tied,
        qkv_bias=bool(config.add_qkv_bias),
        qk_norm=bool(config.qk_layernorm),
        experts=experts,
        moe_ffn=(config.moe_ffn_hidden_size or config.ffn_hidden_size) if experts else 0,
        moe_layers=moe,
    )


def _moe_layers(config: Any) -> frozenset[int]:
    """`moe_layer_freq`: one layer of so many, counted from the first; or a list with 1 for each layer of experts."""
    frequency, layers = config.moe_layer_freq, range(config.num_layers)
    if isinstance(frequency, int):
        return frozenset(layer for layer in layers if layer % frequency == 0)
    return frozenset(layer for layer, moe in zip(layers, frequency, strict=True) if moe)
