"""Which Megatron-Core options decide where weights lie, and which are refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from publisher.adapters.megatron_config import read_architecture
from publisher.adapters.megatron_geometry import Architecture
from publisher.errors import MappingMismatch


def config(**changes: Any) -> SimpleNamespace:
    """What TransformerConfig has after its own defaults, of a small Qwen3."""
    values = {
        "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 8, "num_query_groups": 2,
        "kv_channels": 16, "num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_layer_freq": 1,
        "add_qkv_bias": False, "qk_layernorm": True, "gated_linear_unit": True, "normalization": "RMSNorm",
        "add_bias_linear": False, "fp8_param": False, "multi_latent_attention": False,
    }  # fmt: skip
    return SimpleNamespace(**values | changes)


def read(**changes: Any) -> Architecture:
    return read_architecture(config(**changes), vocab=100, padded_vocab=128, tied=True)


def test_a_dense_model() -> None:
    assert read() == Architecture(
        layers=4, hidden=64, ffn=160, heads=8, groups=2, head_dim=16, vocab=100, padded_vocab=128,
        tied=True, qk_norm=True,
    )  # fmt: skip


def test_what_is_left_out_follows_from_the_rest() -> None:
    found = read(num_query_groups=None, kv_channels=None)
    assert (found.groups, found.head_dim) == (8, 8)


@pytest.mark.parametrize(("frequency", "layers"), [(1, {0, 1, 2, 3}), (2, {0, 2}), ([0, 1, 1, 0], {1, 2})])
def test_layers_of_experts(frequency: Any, layers: set[int]) -> None:
    found = read(num_moe_experts=4, moe_ffn_hidden_size=32, moe_layer_freq=frequency)
    assert (found.experts, found.moe_ffn, found.moe_layers) == (4, 32, frozenset(layers))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("moe_mlp_glu_interleave_size", 32),
        ("moe_single_grouped_weight", True),
        ("attention_output_gate", True),
        ("multi_latent_attention", True),
        ("fp8_param", True),
        ("fp4_param", True),
        ("layernorm_zero_centered_gamma", True),
        ("rotary_interleaved", True),
        ("add_bias_linear", True),
        ("gated_linear_unit", False),
        ("normalization", "LayerNorm"),
        ("mtp_num_layers", 1),
    ],
)
def test_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(MappingMismatch, match=f"{option}={value!r}: "):
        read(**{option: value})


def test_all_of_them_at_once() -> None:
    with pytest.raises(
        MappingMismatch, match=r"(?s)attention_output_gate.*fp8_param=True.*shared by 3 groups"
    ):
        read(fp8_param=True, attention_output_gate=True, num_query_groups=3)


def test_a_vocabulary_that_is_larger_than_the_model_s() -> None:
    with pytest.raises(MappingMismatch, match="has 129 rows, the model's only 128"):
        read_architecture(config(), vocab=129, padded_vocab=128, tied=False)
