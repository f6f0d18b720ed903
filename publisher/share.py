"""Move a model's weights and its Adam moments into memory that the publisher process maps too.

Zero-copy from then on: the optimizer itself writes there. Parameters keep their identity, ties are kept, and the
training goes on bit for bit as it would have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from chunkstore.torch_dtypes import DTYPE_NAMES
from manifest.naming import canonical_tensors
from publisher.errors import MappingMismatch, OptimizerRefused
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
            if name not in live:
                raise MappingMismatch(f"{name} is no longer in the model", hint=_ONE_ARCHITECTURE)
        self._check_ties(live)
        for name in self.tensors:
            self.bring_home(name, live[name])

    @cached_property
    def _homes(self) -> list[list[str]]:
        """Names that live in one storage."""
        homes: dict[int, list[str]] = {}
        for name, shared in self.tensors.items():
            if shared.numel():
                homes.setdefault(_address(shared), []).append(name)
        return [names for names in homes.values() if len(names) > 1]

    @cached_property
    def _entangled(self) -> set[str]:
        """Names whose home shows some, but not just the same, elements as another's."""
        return {
            name
            for names in self._homes
            if not all(_same_memory(self.tensors[n], self.tensors[names[0]]) for n in names)
            for name in names
        }

    def _check_ties(self, live: Mapping[str, torch.Tensor]) -> None:
        """Names of one tensor may only move together: one's new values would overwrite the other's."""
        for first, *others in self._homes:
            apart = [n for n in others if not _same_memory(live[n], live[first])]
            if apart and first not in self._entangled:
                raise MappingMismatch(
                    f"{first} and {', '.join(apart)} were one tensor at attach and are no longer",
                    hint=_ONE_ARCHITECTURE,
                )

    def bring_home(self, name: str, tensor: torch.Tensor) -> None:
        """Make `tensor`'s values the shared ones; a parameter moves back in."""
        shared = self.tensors[name]
        if _same_memory(tensor, shared):
            return
        if name in self._entangled:
            raise MappingMismatch(
                f"{name} shared memory with another tensor of the model at attach and no longer does",
                hint=_ONE_ARCHITECTURE,
            )
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


class _Mover:
    """Gives each storage a region of one file, and moves tensors there: those of one storage share one again."""

    def __init__(self) -> None:
        self.end = HEADER
        self._offsets: dict[int, int] = {}

    def reserve(self, nbytes: int) -> int:
        """First byte of a new region."""
        offset, self.end = self.end, -(-(self.end + nbytes) // ALIGNMENT) * ALIGNMENT
        return offset

    def reserve_storage(self, tensor: torch.Tensor) -> None:
        if tensor.numel() and _address(tensor) not in self._offsets:
            self._offsets[_address(tensor)] = self.reserve(tensor.untyped_storage().nbytes())

    def place(self, tensor: torch.Tensor) -> Place:
        """Where a tensor of a reserved storage goes; one without elements goes nowhere."""
        inside = int(tensor.storage_offset()) * tensor.element_size()
        offset = self._offsets[_address(tensor)] + inside if tensor.numel() else HEADER
        return _place(tensor, tuple(tensor.stride()), offset)

    def move(self, tensors: Sequence[torch.Tensor], file: StateFile) -> None:
        """Let `tensors`, all those of one storage, live in the file: the same elements, strides included."""
        old = tensors[0].untyped_storage()
        region = file.region(self._offsets[old.data_ptr()], old.nbytes())
        region.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
        for tensor in tensors:
            new = torch.empty(0, dtype=tensor.dtype)
            tensor.data = new.set_(
                region.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )


@torch.no_grad()
def _move(
    model: nn.Module, named: Mapping[str, torch.Tensor], states: Mapping[str, dict[str, Any]], spool: Path
) -> SharedState:
    live = [t for t in [*model.parameters(), *model.buffers()] if t.numel()]
    parameters = {_address(p) for p in model.parameters()}
    moving = [t for t in live if _address(t) in parameters]
    moving += [state[key] for state in states.values() for key in _keys(state) if state[key].numel()]
    copied = {name: t for name, t in named.items() if t.numel() and _address(t) not in parameters}
    mover = _Mover()
    storages: dict[int, list[torch.Tensor]] = {}
    for tensor in moving:
        storages.setdefault(_address(tensor), []).append(tensor)
        mover.reserve_storage(tensor)
    places = {
        name: _place(t, _contiguous(t.shape), mover.reserve(t.numel() * t.element_size()))
        for name, t in copied.items()
    }
    places |= {name: mover.place(t) for name, t in named.items() if name not in copied}
    moments = {name: {key: mover.place(state[key]) for key in _keys(state)} for name, state in states.items()}

    remove_stale(spool)
    file = StateFile.create(spool, mover.end)
    try:
        for tensors in storages.values():  # one after the other, so that never much is there twice
            mover.move(tensors, file)
        shared = SharedState(
            file,
            {name: file.tensor(places[name]) if name in copied else t.detach() for name, t in named.items()},
            {name: {key: state[key].detach() for key in _keys(state)} for name, state in states.items()},
        )
        shared.refresh(model)
        write_layout(file, Layout(nbytes=mover.end, tensors=places, moments=moments))
    except BaseException:  # whatever it was, nobody will map this memory
        file.remove()
        raise
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
