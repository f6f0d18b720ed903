"""Read torch's Adam-family optimizers: which parameters they step, with what state and hyper-parameters."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from publisher.errors import OptimizerRefused
from publisher.inversion import Hyper

_SNAPSHOT_HINT = "set `detect: snapshot`, which accepts any optimizer for 2 bytes of memory per parameter"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One parameter as its optimizer's last step left it. m, v: fp32, of the parameter's shape.

    `step`: how many steps this parameter has taken; 0, with no moments, before the first.
    """

    step: int
    hyper: Hyper
    m: torch.Tensor | None
    v: torch.Tensor | None


def check_invertible(optimizer: Optimizer) -> None:
    """Raises OptimizerRefused unless the optimizer's own step is torch's Adam or AdamW."""
    if not isinstance(optimizer, Adam) or type(optimizer).step not in (Adam.step, AdamW.step):
        raise OptimizerRefused(
            f"{type(optimizer).__name__} is not torch.optim.Adam or AdamW: its steps cannot be inverted",
            hint=_SNAPSHOT_HINT,
        )


def check_parameter(name: str, parameter: torch.Tensor, group: dict[str, Any]) -> None:
    """Raises OptimizerRefused, naming the parameter, if a step on it cannot be inverted."""
    reason = None
    if parameter.dtype != torch.float32:
        reason = f"is {parameter.dtype} in the optimizer, without an fp32 master"
    elif not hyper_of(group).invertible:
        reason = f"has lr·weight_decay ≥ 1 (lr {group['lr']}, weight_decay {group['weight_decay']})"
    if reason:
        raise OptimizerRefused(
            f"parameter {name} {reason}: its steps cannot be inverted", hint=_SNAPSHOT_HINT
        )


def step_records(optimizer: Optimizer, wanted: Container[int]) -> Iterator[tuple[torch.Tensor, StepRecord]]:
    """The parameters whose `id()` is `wanted`, with their state now.

    Call it in the step post-hook: schedulers rewrite lr right after.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in wanted:
                yield parameter, _record(group, optimizer.state.get(parameter) or {})


def _record(group: dict[str, Any], state: dict[str, Any]) -> StepRecord:
    variance = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    return StepRecord(steps_taken(state), hyper_of(group), state.get("exp_avg"), state.get(variance))


def steps_taken(state: Mapping[str, Any]) -> int:
    """A parameter's step count, from its optimizer state; 0 before the first step."""
    return int(state["step"]) if "step" in state else 0


def hyper_of(group: dict[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    decoupled = group.get("decoupled_weight_decay", False)
    return Hyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]) if decoupled else 0.0,
    )
