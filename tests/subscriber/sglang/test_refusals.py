"""What is not synced is named, with what to change."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from subscriber.sglang.plugin import unguarded
from subscriber.sglang.refusals import refusals


class UnquantizedLinearMethod:
    """Named as SGLang's."""


class Fp8LinearMethod:
    """Named as SGLang's."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.layer.quant_method = UnquantizedLinearMethod()  # type: ignore[assignment]
        self.layer.view = self.layer.weight.data[:2]
        self.layer.steps = torch.zeros(3, dtype=torch.int64)
        self.register_buffer("cos_sin", torch.zeros(4), persistent=False)

    def load_weights(self, weights: Any) -> None: ...


PLAIN: dict[str, Any] = {
    "pp_size": 1, "nnodes": 1, "attn_dp_size": 1, "enable_dp_attention": False, "enable_eplb": False,
    "elastic_ep_backend": None, "enable_lora": None, "lora_paths": None, "speculative_algorithm": None,
    "enable_hierarchical_cache": False, "enable_lmcache": False, "enable_flexkv": False,
    "disaggregation_mode": "null", "cpu_offload_gb": 0, "offload_group_size": -1, "ple_offload_embedding": None,
    "weight_cache_mode": "off", "quantization": None, "load_format": "auto", "moe_runner_backend": "auto",
    "enable_unified_cache_external_linker": False,
}  # fmt: skip

REFUSED: dict[str, Any] = {
    "pp_size": 2, "nnodes": 2, "attn_dp_size": 2, "enable_dp_attention": True, "enable_eplb": True,
    "elastic_ep_backend": "mooncake", "enable_lora": True, "lora_paths": ["a"], "speculative_algorithm": "EAGLE",
    "enable_hierarchical_cache": True, "enable_lmcache": True, "enable_flexkv": True,
    "disaggregation_mode": "prefill", "cpu_offload_gb": 4, "offload_group_size": 2, "ple_offload_embedding": True,
    "weight_cache_mode": "client", "quantization": "fp8", "load_format": "flash_rl",
    "moe_runner_backend": "flashinfer_trtllm", "enable_unified_cache_external_linker": True,
}  # fmt: skip


def test_a_multimodal_model_is_refused() -> None:
    """SGLang keeps embeddings of images by their hashes, and no flush drops them."""
    (why,) = refusals(Model(), SimpleNamespace(**PLAIN), SimpleNamespace(is_multimodal=True))
    assert "embeddings of images" in why
    assert refusals(Model(), SimpleNamespace(**PLAIN), SimpleNamespace(is_multimodal=False)) == []


def test_plain_servers_are_not_refused() -> None:
    assert refusals(Model(), SimpleNamespace(**PLAIN)) == []
    assert refusals(Model(), SimpleNamespace()) == []  # of another release


@pytest.mark.parametrize("name", REFUSED)
def test_each_setting_is_refused_by_name(name: str) -> None:
    found = refusals(Model(), SimpleNamespace(**{**PLAIN, name: REFUSED[name]}))
    assert len(found) == 1
    assert found[0].startswith(f"{name}={REFUSED[name]!r}: ")
    assert "launch" in found[0]


def test_all_settings_at_once() -> None:
    assert len(refusals(Model(), SimpleNamespace(**REFUSED))) == len(REFUSED)


def named(model: nn.Module) -> str:
    return "\n".join(refusals(model, SimpleNamespace(**PLAIN)))


def test_quantized_layers() -> None:
    model = Model()
    model.layer.quant_method = Fp8LinearMethod()  # type: ignore[assignment]
    model.other = nn.Linear(2, 2)
    model.other.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    assert "layer 'layer' is quantized (Fp8LinearMethod)" in named(model)
    assert "parameter 'other.weight' is torch.int8" in named(model)


@pytest.mark.parametrize("flag", ["use_flashinfer_trtllm_moe", "w13_swiglu_interleaved"])
def test_rearranged_experts(flag: str) -> None:
    model = Model()
    setattr(model.layer.quant_method, flag, False)
    assert named(model) == ""
    setattr(model.layer.quant_method, flag, True)
    assert named(model).startswith("layer 'layer' ")


def test_weights_packed_for_amx() -> None:
    model = Model()
    model.layer.use_intel_amx_backend = True  # type: ignore[assignment]
    assert "layer 'layer' is packed for AMX" in named(model)


def test_tensors_derived_from_weights() -> None:
    model = Model()
    model.layer.w_kc = torch.ones(3, dtype=torch.bfloat16)
    model.layers = [torch.ones(2), {"no": "tensor"}]  # type: ignore[assignment]
    assert "tensor 'layer.w_kc' is neither a parameter nor a buffer" in named(model)
    assert "tensor 'layers' is neither a parameter nor a buffer" in named(model)
    assert len(refusals(model, SimpleNamespace())) == 2


def test_models_that_derive_tensors_after_loading() -> None:
    class Derives(Model):
        def post_load_weights(self) -> None: ...

    assert "Derives derives further tensors" in named(Derives())


def test_models_without_a_loader() -> None:
    assert "Linear has no load_weights" in named(nn.Linear(2, 2))


def test_long_lists_are_cut_and_counted() -> None:
    model = Model()
    model.many = nn.ModuleList(nn.Linear(1, 1) for _ in range(30))
    for layer in model.many:
        layer.quant_method = Fp8LinearMethod()  # type: ignore[assignment]
    found = refusals(model, SimpleNamespace())
    assert len(found) == 21
    assert found[-1] == "… and 10 more of this kind"


UPDATER = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", "begin_weight_update", "end_weight_update", "release_memory_occupation",
    "resume_memory_occupation",
)  # fmt: skip
SCHEDULER = ("continue_generation", "pause_generation", "grammar_manager", "handle_update_weight_version")


def test_a_release_whose_ways_of_writing_are_not_all_known_is_refused() -> None:
    """A hook on a name that is not there does nothing, and SGLang goes on without it."""
    updater = dict.fromkeys(UPDATER)
    scheduler: dict[str, Any] = dict.fromkeys(SCHEDULER, SimpleNamespace(grammar_queue=[]))
    assert unguarded(SimpleNamespace(**updater), SimpleNamespace(**scheduler)) == []
    for name in (*UPDATER, *SCHEDULER):
        (why,) = unguarded(
            SimpleNamespace(**{key: None for key in updater if key != name}),
            SimpleNamespace(**{key: value for key, value in scheduler.items() if key != name}),
        )
        assert name in why
