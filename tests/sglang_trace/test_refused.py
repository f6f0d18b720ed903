"""Real models that do not fit, or cannot be followed, are refused with every offender named and nothing written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manifest.catalog import Catalog, TensorSpec
from subscriber.errors import EngineMismatch
from subscriber.sglang.boxes import Layout
from subscriber.sglang.coverage import coverage
from subscriber.sglang.refusals import SERVER_ARGS, refusals
from subscriber.sglang.trace import trace
from tests.sglang_trace.ranks import catalog_of, checkpoint_tensors, leave, live_bytes, load_rank
from tests.support.tiny_models import save_deepseek, save_qwen3, save_qwen3_moe


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    leave()
    return save_qwen3(tmp_path, seed=1)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = live_bytes(model)
    places = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    yield
    assert live_bytes(model) == before
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == places


def message_of(model: nn.Module, catalog: Catalog) -> str:
    with unchanged(model), pytest.raises(EngineMismatch) as error:
        trace(model, catalog)
    return error.value.message


def changed(checkpoint: Path, **specs: TensorSpec | None) -> Catalog:
    """The checkpoint's catalog with tensors exchanged, by the end of their names; None drops one."""
    tensors = {t.name: t for t in catalog_of(checkpoint_tensors(checkpoint)).tensors}
    for name, spec in specs.items():
        tensors.pop(name.replace("__", "."), None)
        if spec is not None:
            tensors[spec.name] = spec
    return Catalog.of(list(tensors.values()))


def test_missing_names_leave_live_rows_unaccounted_for(checkpoint: Path) -> None:
    model, _ = load_rank(checkpoint)
    catalog = changed(
        checkpoint,
        model__layers__1__mlp__up_proj__weight=None,
        model__layers__0__self_attn__k_proj__weight=None,
        model__norm__weight=None,
    )
    with unchanged(model):
        traced = trace(model, catalog)
        found = coverage(model, traced.map, traced.fills)
    assert found.offenders == (
        "'model.layers.0.self_attn.qkv_proj.weight', rows 128 to 191: 4,096 elements are not loaded from any "
        "checkpoint tensor",
        "'model.layers.1.mlp.gate_up_proj.weight', rows 128 to 255: 8,192 elements are not loaded from any "
        "checkpoint tensor",
        "'model.norm.weight', rows 0 to 63: 64 elements are not loaded from any checkpoint tensor",
    )


def test_surplus_names_have_no_home(checkpoint: Path) -> None:
    """Some the loader fails on; others it passes over in silence, and the layout names them."""
    model, _ = load_rank(checkpoint)
    surplus = (
        "model.layers.0.self_attn.q_proj.scale_of",
        "model.extra.weight",
        "model.layers.7.mlp.up_proj.weight",
    )
    tensors = [*catalog_of(checkpoint_tensors(checkpoint)).tensors]
    catalog = Catalog.of([*tensors, *(TensorSpec(name, "BF16", (64,)) for name in surplus)])
    with unchanged(model), pytest.raises(EngineMismatch) as error:
        Layout(catalog, [trace(model, catalog).map])
    loud = error.value.message
    quiet = Catalog.of([t for t in catalog.tensors if t.name not in surplus or repr(t.name) not in loud])
    named = {name for name in surplus if repr(name) in loud}
    if named != set(surplus):
        with unchanged(model), pytest.raises(EngineMismatch) as error:
            Layout(quiet, [trace(model, quiet).map])
        named |= {name for name in surplus if repr(name) in error.value.message}
    assert named == set(surplus)


def respec(checkpoint: Path, specs: dict[str, tuple[str, tuple[int, ...]]]) -> Catalog:
    return changed(checkpoint, **{n.replace(".", "__"): TensorSpec(n, *spec) for n, spec in specs.items()})


def test_wrong_shapes_and_dtypes(checkpoint: Path) -> None:
    model, _ = load_rank(checkpoint)
    specs = {
        "model.layers.0.input_layernorm.weight": ("BF16", (32,)),
        "model.embed_tokens.weight": ("BF16", (500, 64)),
        "model.layers.0.self_attn.q_proj.weight": ("BF16", (128, 60)),
        "model.layers.1.mlp.gate_proj.weight": ("F32", (128, 64)),
        "model.norm.weight": ("F16", (64,)),
    }
    message = message_of(model, respec(checkpoint, specs))
    assert all(repr(name) in message for name in specs)
    assert "'model.layers.1.mlp.gate_proj.weight' is F32 in the catalog, BF16 in the engine" in message
    assert "q_proj.weight' makes the loader fail with AssertionError" in message
    assert "o_proj" not in message


def test_shapes_that_sglang_pads_or_cuts_in_silence(checkpoint: Path) -> None:
    """On a CPU its loader zeroes the rows that a tensor lacks, and ignores those that it has too many."""
    model, _ = load_rank(checkpoint)
    short, long = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
    with unchanged(model):
        traced = trace(model, respec(checkpoint, {short: ("BF16", (64, 64))}))
        found = coverage(model, traced.map, traced.fills)
        assert found.offenders == (
            "'model.layers.0.self_attn.qkv_proj.weight', rows 64 to 127: 4,096 elements are zeroed by the loader, but "
            "not zero now",
        )
        catalog = respec(checkpoint, {long: ("BF16", (64, 150))})
        with pytest.raises(EngineMismatch, match=f"{long!r} has 9600 elements, the engine holds 8192"):
            Layout(catalog, [trace(model, catalog).map])


def test_weights_that_were_transposed_after_loading(checkpoint: Path) -> None:
    model, _ = load_rank(checkpoint)
    layer: Any = model.get_submodule("model.layers.1.mlp.down_proj")
    layer.weight.data = layer.weight.data.t().contiguous()
    assert "'model.layers.1.mlp.down_proj.weight'" in message_of(
        model, catalog_of(checkpoint_tensors(checkpoint))
    )


def test_weights_that_were_packed_after_loading(checkpoint: Path) -> None:
    """A new parameter without its loader, in a shape of its own, as packing for a kernel leaves it."""
    model, _ = load_rank(checkpoint)
    layer: Any = model.get_submodule("model.layers.0.self_attn.qkv_proj")
    packed = layer.weight.data.reshape(16, 16, 64)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    message = message_of(model, catalog_of(checkpoint_tensors(checkpoint)))
    for name in ("q_proj", "k_proj", "v_proj"):
        assert f"'model.layers.0.self_attn.{name}.weight' makes the loader fail" in message


def test_quantized_parameters(checkpoint: Path) -> None:
    model, args = load_rank(checkpoint)
    layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
    message = message_of(model, catalog_of(checkpoint_tensors(checkpoint)))
    assert "'model.layers.0.mlp.down_proj.weight' has dtype torch.float8_e4m3fn" in message
    assert len(refusals(model, args)) == 1


def test_experts_whose_rows_were_interleaved(tmp_path: Path) -> None:
    """SGLang's option keeps the shape, so only its flag (and the digests) tell."""
    leave()
    model, args = load_rank(save_qwen3_moe(tmp_path, seed=1))
    assert refusals(model, args) == []
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    assert type(experts.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    experts.quant_method.w13_swiglu_interleaved = True
    assert refusals(model, args) == [
        "layer 'model.layers.1.mlp.experts' has interleaved gate and up rows: unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
    ]


def test_settings_are_named_as_in_this_sglang(checkpoint: Path) -> None:
    """A name that SGLang does not have would refuse nothing, for ever."""
    _, args = load_rank(checkpoint)
    assert [name for name, _, _ in SERVER_ARGS if not hasattr(args, name)] == []


def test_deepseek_derives_tensors(tmp_path: Path) -> None:
    leave()
    model, args = load_rank(checkpoint := save_deepseek(tmp_path, seed=1))
    found = refusals(model, args)
    assert "DeepseekV3ForCausalLM derives further tensors" in found[0]
    derived = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("w_kc", "w_vc")]
    assert len(found) == 1 + len(derived)
    values = {name: get(model, name).clone() for name in derived}
    message = message_of(model, catalog_of(checkpoint_tensors(checkpoint)))
    for name in derived:
        assert any(name in line for line in found)
        assert f"{name!r} is computed when weights are loaded" in message
        assert torch.equal(get(model, name), values[name])


def get(model: nn.Module, name: str) -> torch.Tensor:
    module, _, attribute = name.rpartition(".")
    value = getattr(model.get_submodule(module), attribute)
    assert isinstance(value, torch.Tensor)
    return value
