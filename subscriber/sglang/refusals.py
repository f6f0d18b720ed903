"""What this release does not sync into, found in a running SGLang before anything is staged.

Each refusal is one sentence that names what was found and what to change. Attribute names are those of SGLang 0.5.23;
an attribute that another release does not have counts as not set.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from subscriber.sglang.memories import attributes, weights

_UNQUANTIZED: Final = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)
_FLOATS: Final = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})

_Check = tuple[str, Callable[[Any], bool], str]


def _more_than(limit: int) -> Callable[[Any], bool]:
    return lambda value: value is not None and value > limit


def _other_than(*fine: object) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in fine


SERVER_ARGS: Final[tuple[_Check, ...]] = (
    ("pp_size", _more_than(1), "pipeline parallelism is not supported: launch with --pp-size 1"),
    (
        "attn_dp_size",
        _more_than(1),
        "data-parallel attention is not supported: launch without --attn-dp-size",
    ),
    (
        "enable_dp_attention",
        bool,
        "data-parallel attention is not supported: launch without --enable-dp-attention",
    ),
    ("nnodes", _more_than(1), "a server over several nodes is not supported: launch one server per node"),
    ("enable_eplb", bool, "expert rebalancing moves experts at run time: launch without --enable-eplb"),
    (
        "elastic_ep_backend",
        _other_than("none"),
        "elastic expert parallelism moves experts at run time: launch without --elastic-ep-backend",
    ),
    (
        "enable_lora",
        bool,
        "LoRA adapters are not synced: launch without --enable-lora, publish `lora: merged`",
    ),
    ("lora_paths", bool, "LoRA adapters are not synced: launch without --lora-paths, publish `lora: merged`"),
    (
        "speculative_algorithm",
        bool,
        "a draft model would keep old weights: launch without --speculative-algorithm",
    ),
    (
        "enable_hierarchical_cache",
        bool,
        "a flush leaves host and storage caches of old weights: launch without --enable-hierarchical-cache",
    ),
    (
        "enable_lmcache",
        bool,
        "a flush leaves LMCache's copies of old weights: launch without --enable-lmcache",
    ),
    ("enable_flexkv", bool, "a flush leaves FlexKV's copies of old weights: launch without --enable-flexkv"),
    (
        "enable_unified_cache_external_linker",
        bool,
        "a flush leaves the external cache of old weights: launch without --enable-unified-cache-external-linker",
    ),
    (
        "disaggregation_mode",
        _other_than("null"),
        "prefill and decode servers exchange KV of other weights: launch without --disaggregation-mode",
    ),
    ("cpu_offload_gb", _more_than(0), "offloaded weights are not in place: launch without --cpu-offload-gb"),
    (
        "offload_group_size",
        _more_than(0),
        "offloaded weights are not in place: launch without --offload-group-size",
    ),
    (
        "ple_offload_embedding",
        bool,
        "offloaded embeddings are not in place: launch with --no-ple-offload-embedding",
    ),
    (
        "weight_cache_mode",
        _other_than("off"),
        "a weight cache shares its memory with other servers: launch with --weight-cache-mode off",
    ),
    (
        "quantization",
        bool,
        "quantized weights are not synced: launch without --quantization, in the trained dtype",
    ),
    (
        "load_format",
        lambda value: str(getattr(value, "value", value)) == "flash_rl",
        "this load format quantizes: launch with --load-format auto",
    ),
    (
        "moe_runner_backend",
        lambda value: str(value) in ("flashinfer_trtllm", "flashinfer_trtllm_routed", "aiter"),
        "this backend rearranges the experts: launch with --moe-runner-backend triton",
    ),
)
"""Name of a setting, whether a value of it is refused, and why with what to change."""


def refusals(model: nn.Module, server_args: object, model_config: object = None) -> list[str]:
    """Everything about this server that cannot be synced; empty if nothing is known to be in the way.

    `server_args`, `model_config`: SGLang's, or any objects with their attributes; lists are cut after 20 modules each.
    """
    found = [
        f"{name}={value!r}: {why}"
        for name, refused, why in SERVER_ARGS
        if refused(value := getattr(server_args, name, None))
    ]
    if getattr(model_config, "is_multimodal", False):
        found.append(
            f"{type(model).__name__} is multimodal: a flush leaves embeddings of images by old weights: "
            "serve a text model"
        )
    if not callable(getattr(model, "load_weights", None)):
        found.append(f"{type(model).__name__} has no load_weights, so its layout cannot be traced")
    if hasattr(model, "post_load_weights"):
        found.append(
            f"{type(model).__name__} derives further tensors from its weights after loading (post_load_weights); "
            "they would keep the old policy: serve another architecture"
        )
    for check in (_quantized, _rearranged, _not_float, _derived):
        named = list(check(model))
        found += named[:20] + ([f"… and {len(named) - 20} more of this kind"] if len(named) > 20 else [])
    return found


def _quantized(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _UNQUANTIZED:
            yield f"layer {name!r} is quantized ({type(method).__name__}): serve the model in the trained dtype"


def _rearranged(model: nn.Module) -> Iterator[str]:
    aiter = os.environ.get("SGLANG_USE_AITER", "").lower() in ("1", "true") and torch.version.hip is not None
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if getattr(module, "use_intel_amx_backend", False):
            yield f"layer {name!r} is packed for AMX: run where SGLang does not use AMX kernels"
        if getattr(method, "use_flashinfer_trtllm_moe", False):
            yield f"layer {name!r} is in TensorRT-LLM's block layout: launch with --moe-runner-backend triton"
        if getattr(method, "w13_swiglu_interleaved", False):
            yield f"layer {name!r} has interleaved gate and up rows: unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
        if aiter and type(method).__name__ == "UnquantizedFusedMoEMethod":
            yield f"layer {name!r} is shuffled for aiter: unset SGLANG_USE_AITER"


def _not_float(model: nn.Module) -> Iterator[str]:
    for name, tensor in weights(model):
        if isinstance(tensor, nn.Parameter) and tensor.dtype not in _FLOATS:
            yield f"parameter {name!r} is {tensor.dtype}, as in quantized layers: serve the model in the trained dtype"


def _derived(model: nn.Module) -> Iterator[str]:
    """Floating tensors beside parameters and buffers. Those derived from weights would not follow an update."""
    known = {_storage(t) for t in [*model.parameters(), *model.buffers()]}
    for name, tensor in attributes(model):
        if not tensor.dtype.is_floating_point or not tensor.numel():
            continue
        if tensor.layout != torch.strided or _storage(tensor) not in known:
            yield f"tensor {name!r} is neither a parameter nor a buffer and may be derived from weights: not supported"


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
