"""Read torch's Adam-family optimizers: which parameters they step, with what state and hyper-parameters."""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.optim import Adam, AdamW, Optimizer

from publisher.errors import OptimizerRefused
from publisher.inversion import Hyper

NOT_INVERTIBLE = (
    "if the optimizer steps fp32 masters, give Publisher.attach the inner optimizer and `masters`; otherwise set "
    "`detect: snapshot`, which accepts any optimizer for 2 bytes of memory per parameter"
)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One parameter as its optimizer's last step left it. m, v: fp32, of the parameter's shape.

    `step`: how many steps this parameter has taken; 0, with no moments, before the first.
    """

    step: int
    hyper: Hyper
    m: torch.Tensor | None
    v: torch.Tensor | None

    def of(self, part: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with some elements of the moments."""
        m, v = (None if x is None else part(x) for x in (self.m, self.v))
        return replace(self, m=m, v=v)


def not_invertible(parameter: torch.Tensor, optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Why the steps on `parameter` cannot be inverted, as the end of a sentence about it; None if they can."""
    if not isinstance(optimizer, Adam) or type(optimizer).step not in (Adam.step, AdamW.step):
        return f"is stepped by {type(optimizer).__name__}, which is not torch.optim.Adam or AdamW"
    if parameter.dtype != torch.float32:
        return f"is {parameter.dtype} in the optimizer, without an fp32 master"
    if group["differentiable"]:
        return "is in a group with differentiable=True"
    if not hyper_of(group).invertible:
        return f"has lr·weight_decay ≥ 1 (lr {group['lr']}, weight_decay {group['weight_decay']})"
    return _why_not_state(parameter, optimizer.state.get(parameter) or {}, group)


def _why_not_state(parameter: torch.Tensor, state: Mapping[str, Any], group: dict[str, Any]) -> str | None:
    if not state:
        return None  # torch makes it with the first step
    if "step" not in state:
        return f"has {', '.join(state)} but no step count"
    for key in ("exp_avg", _variance(group)):
        moment = state.get(key)
        if moment is None:
            return f"has taken {steps_taken(state)} steps but has no {key}"
        if not fits(moment, parameter):
            return f"has {key} in {moment.dtype}, shape {tuple(moment.shape)}, not in fp32 as itself"
    return None


def fits(moment: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    """Whether the inversion can use it: fp32, of the parameter's shape. Rounded moments do not tell the step taken."""
    return moment is not None and moment.dtype == torch.float32 and moment.shape == parameter.shape


def check_not_capturing() -> None:
    """Raises OptimizerRefused while a CUDA graph is being recorded: its replays step the weights and run no hook."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise OptimizerRefused(
            "the optimizer's step is being recorded in a CUDA graph, and its replays run no hook",
            hint="leave the optimizer's step out of the graph, or set `detect: snapshot`, which needs no hook",
        )


def step_records(optimizer: Optimizer, wanted: Container[int]) -> Iterator[tuple[torch.Tensor, StepRecord]]:
    """The parameters whose `id()` is `wanted`, with their state now.

    Call it in the step post-hook: schedulers rewrite lr right after.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in wanted:
                yield parameter, _record(group, optimizer.state.get(parameter) or {})


def stepped(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """What the optimizer steps, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _record(group: dict[str, Any], state: dict[str, Any]) -> StepRecord:
    return StepRecord(steps_taken(state), hyper_of(group), state.get("exp_avg"), state.get(_variance(group)))


def _variance(group: dict[str, Any]) -> str:
    return "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"


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
