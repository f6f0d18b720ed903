"""What cannot be inverted is refused with parameter, reason and hint; what turns so later is sent whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Muon, Optimizer

from publisher.errors import MappingMismatch, OptimizerRefused
from tests.publisher.zoo import assert_identical, attach, fresh_store

Make = Callable[[nn.Module], Optimizer]


def _model() -> nn.Module:
    return nn.ModuleDict({"layer": nn.Linear(150, 120, bias=False)})


def _with_state(change: Callable[[dict[str, Any]], object]) -> Make:
    """An AdamW that has taken a step, its state then changed."""

    def make(model: nn.Module) -> Optimizer:
        optimizer = AdamW(model.parameters())
        _step(model, optimizer)
        for state in optimizer.state.values():
            change(state)
        return optimizer

    return make


def _set(key: str, dtype: torch.dtype) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.update({key: state[key].to(dtype)})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda m: Muon(m.parameters()), r"is stepped by Muon, which is not torch\.optim\.Adam"),
        (lambda m: AdamW(m.bfloat16().parameters()), r"is torch\.bfloat16 .*without an fp32 master"),
        (lambda m: AdamW(m.double().parameters()), r"is torch\.float64 .*without an fp32 master"),
        (lambda m: AdamW(m.parameters(), lr=2.0, weight_decay=0.5), "has lr·weight_decay ≥ 1"),
        (lambda m: AdamW(m.parameters(), lr=float("inf")), "has lr·weight_decay ≥ 1"),
        (lambda m: AdamW(m.parameters(), differentiable=True), "differentiable=True"),
        (_with_state(_set("exp_avg", torch.bfloat16)), r"has exp_avg in torch\.bfloat16"),
        (_with_state(_set("exp_avg_sq", torch.float16)), r"has exp_avg_sq in torch\.float16"),
        (_with_state(_set("exp_avg", torch.float8_e4m3fn)), r"has exp_avg in torch\.float8_e4m3fn"),
        (_with_state(_set("exp_avg_sq", torch.uint8)), r"has exp_avg_sq in torch\.uint8"),
        (_with_state(lambda s: s.pop("exp_avg")), "has taken 1 steps but has no exp_avg:"),
        (_with_state(lambda s: s.pop("exp_avg_sq")), "has taken 1 steps but has no exp_avg_sq:"),
        (_with_state(lambda s: s.pop("step")), "has exp_avg, exp_avg_sq but no step count"),
        (_with_state(lambda s: s.update(exp_avg=torch.zeros(3))), r"exp_avg in torch\.float32, shape \(3,\)"),
    ],
)
def test_refused_by_name(make: Make, reason: str) -> None:
    """FIELD_REPORTS: AReaL#1292."""
    model = _model()
    optimizer = make(model)
    with pytest.raises(OptimizerRefused, match=rf"parameter layer\.weight .*{reason}.*detect: snapshot"):
        attach(model, optimizer, fresh_store())


@pytest.mark.parametrize(
    "make", [lambda m: Muon(m.parameters()), _with_state(_set("exp_avg", torch.bfloat16))]
)
def test_snapshot_accepts_what_is_refused(make: Make) -> None:
    model, store = _model(), fresh_store()
    optimizer = make(model)
    with attach(model, optimizer, store, detect="snapshot") as publisher:
        with torch.no_grad():
            model.get_parameter("layer.weight")[3] += 1
        assert publisher.publish().result() is not None
        assert_identical(publisher, model, store, 1)


def test_a_tensor_that_is_no_real_float_is_refused() -> None:
    model = _model()
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(
        MappingMismatch, match=r"phase: a tensor of dtype torch\.complex64 cannot be published"
    ):
        attach(model, Adam(model.parameters()), fresh_store())


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("exp_avg"),
        _set("exp_avg", torch.bfloat16),
        _set("exp_avg_sq", torch.float16),
        lambda s: s.update(exp_avg=torch.zeros(150 * 120)),
        lambda s: s.update(step=s["step"] + 5),
    ],
)
def test_state_that_turns_unusable_in_training_is_sent_whole(
    change: Callable[[dict[str, Any]], object],
) -> None:
    """Refusing inside optimizer.step() would end a training run that can go on."""
    model, store = _model(), fresh_store()
    optimizer = AdamW(model.parameters(), lr=1e-6)
    armed: list[Callable[[dict[str, Any]], object]] = []

    def ahead(optimizer: Optimizer, *_: object) -> None:
        """Between torch's step and the publisher's hook, which is registered later."""
        for spoil in armed:
            spoil(optimizer.state[model.get_parameter("layer.weight")])

    optimizer.register_step_post_hook(ahead)
    with attach(model, optimizer, store) as publisher:
        _step(model, optimizer)
        kept = dict(optimizer.state[model.get_parameter("layer.weight")])
        armed.append(change)  # for the next step
        _step(model, optimizer)
        armed.clear()
        commit = publisher.publish().result()
        assert commit is not None
        assert commit.manifest.stats.unproved_blocks == 2
        assert_identical(publisher, model, store, 1)
        optimizer.state[model.get_parameter("layer.weight")].update(kept)
        _step(model, optimizer)
        assert publisher.publish().result() is not None
        assert_identical(publisher, model, store, 2)


def test_a_model_cast_to_bf16_after_attach_is_sent_whole() -> None:
    model, store = _model(), fresh_store()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with attach(model, optimizer, store) as publisher:
        model.bfloat16()
        _step(model, optimizer)
        assert publisher.publish().result() is not None
        assert_identical(publisher, model, store, 1)


def test_a_step_recorded_in_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: torch is made to say that it records."""
    model = _model()
    optimizer = AdamW(model.parameters())
    with attach(model, optimizer, fresh_store()):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(OptimizerRefused, match=r"CUDA graph.*detect: snapshot"):
            _step(model, optimizer)
        monkeypatch.undo()


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    weight = model.get_parameter("layer.weight")
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    optimizer.step()
