"""Move a model's weights and its Adam moments into memory that the publisher process maps too.

Zero-copy from then on: the optimizer itself writes there. Parameters keep their identity, ties are kept, and the
training goes on bit for bit as it would have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from publisher.errors import MappingMismatch, OptimizerRefused
from publisher.mapping import DTYPE_NAMES
from publisher.naming import canonical_tensors
from publisher.spool import ALIGNMENT, HEADER, Layout, Moment, Place, StateFile, remove_stale, write_layout

MOMENTS: Final[tuple[Moment, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_Moments: TypeAlias = dict[str, dict[Moment, torch.Tensor]]


@dataclass
class SharedState:
    """The shared state of one model, as the trainer holds it.

    `tensors`: by canonical name; a parameter's is the memory it lives in. A buffer lives elsewhere, since modules
    replace buffers by assignment, and is copied here by `refresh`. `moments`: by parameter name, then torch's name.
    """

    file: StateFile
    tensors: dict[str, torch.Tensor]
    moments: _Moments

    def refresh(self, model: nn.Module) -> None:
        """Bring in whatever lives elsewhere: buffers, and weights that were given other memory since.

        Raises MappingMismatch if a name is gone or has another shape or dtype.
        """
        live = canonical_tensors(model)
        for name in self.tensors:
            tensor = live.get(name)
            if tensor is None:
                raise MappingMismatch(f"{name} is no longer in the model", hint=_ONE_ARCHITECTURE)
            self.bring_home(name, tensor)

    def bring_home(self, name: str, tensor: torch.Tensor) -> None:
        """Make `tensor`'s values the shared ones; a parameter moves back in."""
        shared = self.tensors[name]
        if _same_memory(tensor, shared):
            return
        _check_form(name, tensor, shared)
        shared.copy_(tensor.detach())
        # Never a buffer: the next assignment would be copied under a graph that may still need this one's values.
        if isinstance(tensor, nn.Parameter):
            tensor.data = shared

    def bring_moments_home(self, name: str, state: dict[str, Any]) -> None:
        """The same for a parameter's optimizer state: load_state_dict gives it other memory."""
        for key, shared in self.moments.get(name, {}).items():
            moment = state.get(key)
            if moment is not None and not _same_memory(moment, shared):
                _check_form(f"{key} of {name}", moment, shared)
                shared.copy_(moment)
                state[key] = shared


_ONE_ARCHITECTURE: Final = "a publisher follows one architecture; attach a new one, with a stream of its own"


def share_optimizer_state(
    optimizer: Optimizer | Sequence[Optimizer], model: nn.Module, spool_dir: Path | str
) -> SharedState:
    """Move the model's parameters, and the moments of Adam-family optimizers over them, into files in `spool_dir`.

    Moments that do not exist yet are made as torch would at the first step. Views of a parameter's memory that are
    neither parameters nor buffers of the model do not follow. Raises OptimizerRefused for state that is not in CPU
    memory, LocalDiskError if the spool has no room.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    named = canonical_tensors(model)
    _check_movable(named)
    states = _adam_states(optimizers, named)
    _check_movable({f"{key} of {name}": state[key] for name, state in states.items() for key in _keys(state)})
    return _move(model, named, states, Path(spool_dir))


def _move(
    model: nn.Module, named: Mapping[str, torch.Tensor], states: Mapping[str, dict[str, Any]], spool: Path
) -> SharedState:
    live = [t for t in [*model.parameters(), *model.buffers()] if t.numel()]
    parameters = {_address(p) for p in model.parameters()}
    moving = [t for t in live if _address(t) in parameters]
    moving += [state[key] for state in states.values() for key in _keys(state) if state[key].numel()]
    copies = {name: t for name, t in named.items() if t.numel() and _address(t) not in parameters}

    plan, end = {}, HEADER  # first byte of each storage
    for tensor in moving:
        if _address(tensor) not in plan:
            plan[_address(tensor)], end = end, _aligned(end + tensor.untyped_storage().nbytes())
    starts = {}
    for name, tensor in copies.items():
        starts[name], end = end, _aligned(end + tensor.numel() * tensor.element_size())

    remove_stale(spool)
    file = StateFile.create(spool, end)
    regions: dict[int, torch.Tensor] = {}

    def place(tensor: torch.Tensor) -> Place:
        """Where a moving tensor goes."""
        inside = int(tensor.storage_offset()) * tensor.element_size()
        first = plan[_address(tensor)] + inside if tensor.numel() else HEADER
        return _place(tensor, tuple(tensor.stride()), first)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        """The same elements in the file; all tensors of one storage share one there."""
        address = _address(tensor)
        if address not in regions:
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            regions[address] = file.region(plan[address], len(raw))
            regions[address].copy_(raw)
        new = torch.empty(0, dtype=tensor.dtype)
        storage = regions[address].untyped_storage()
        return new.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    with torch.no_grad():
        layout = Layout(
            nbytes=end,
            tensors={
                name: _place(t, _contiguous(t.shape), starts[name]) if name in copies else place(t)
                for name, t in named.items()
            },
            moments={
                name: {key: place(state[key]) for key in _keys(state)} for name, state in states.items()
            },
        )
        new_data = {id(t): moved(t) for t in moving}
        for tensor in live:
            if id(tensor) in new_data:
                tensor.data = new_data[id(tensor)]
        for state in states.values():
            for key in _keys(state):
                state[key] = new_data.get(id(state[key]), state[key])
        shared = SharedState(
            file,
            {
                name: file.tensor(layout.tensors[name]) if name in copies else tensor.detach()
                for name, tensor in named.items()
            },
            {name: {key: state[key] for key in _keys(state)} for name, state in states.items()},
        )
        shared.refresh(model)
    write_layout(file, layout)
    return shared


def _adam_states(
    optimizers: Sequence[Optimizer], named: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """The state of every model parameter that an Adam-family optimizer steps, by each of its names."""
    names: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), []).append(name)
    found = {}
    for optimizer in optimizers:
        if not isinstance(optimizer, Adam):
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for name in names.get(id(parameter), []):
                    found[name] = _state(optimizer, group, parameter)
    return found


def _state(optimizer: Adam, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """A parameter's state; before its first step, exactly what torch.optim.Adam would make then."""
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        if group["fused"] or group["capturable"]:
            step = torch.zeros((), dtype=_scalar_dtype(group["fused"]), device=parameter.device)
        else:
            step = torch.tensor(0.0, dtype=_scalar_dtype(fused=False))
        state["step"] = step
        for key in MOMENTS if group["amsgrad"] else MOMENTS[:2]:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def _scalar_dtype(fused: bool | None) -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() == torch.float64 and not fused else torch.float32


def _keys(state: Mapping[str, Any]) -> Iterator[Moment]:
    return (key for key in MOMENTS if key in state)


def _check_movable(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise OptimizerRefused(
                f"{name} is {tensor.layout} on {tensor.device}: only CPU memory can be shared with a publisher process",
                hint="leave `spool` out of publisher.yaml: the publisher then runs inside the trainer, on its device",
            )
        if tensor.dtype not in DTYPE_NAMES:
            raise MappingMismatch(f"{name}: a tensor of dtype {tensor.dtype} cannot be published")


def _check_form(name: str, tensor: torch.Tensor, shared: torch.Tensor) -> None:
    if tensor.shape != shared.shape or tensor.dtype != shared.dtype:
        raise MappingMismatch(
            f"{name} was {shared.dtype} {tuple(shared.shape)} and is now {tensor.dtype} {tuple(tensor.shape)}",
            hint=_ONE_ARCHITECTURE,
        )


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
    )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _place(tensor: torch.Tensor, stride: tuple[int, ...], offset: int) -> Place:
    return Place(
        dtype=DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape), stride=list(stride), offset=offset
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
