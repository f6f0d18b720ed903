"""The live memory of a model: each storage of its parameters and buffers once, by number and name."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from chunkstore.torch_dtypes import DTYPE_NAMES
from subscriber.sglang.boxes import Memory

_Key = tuple[torch.device, int]


class Memories:
    """`found`: the storages of parameters and persistent buffers, which hold weights; a box names them by position.

    `tensors[i]`: the (name, tensor) pairs that lie in storage i, tied ones once per distinct view.
    `problems`: parameters that cannot be mapped, in words.
    """

    def __init__(self, model: nn.Module) -> None:
        self.problems: list[str] = []
        self.tensors: list[list[tuple[str, torch.Tensor]]] = []
        self._numbers: dict[_Key, int] = {}
        found: list[Memory] = []
        for name, tensor in weights(model):
            problem = _unfit(tensor)
            if problem:
                self.problems.append(f"{name!r} {problem}")
                continue
            if not tensor.numel():
                continue
            number = self._numbers.setdefault(_key(tensor), len(found))
            if number == len(found):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                found.append(Memory(name, DTYPE_NAMES[tensor.dtype], elements))
                self.tensors.append([])
            if DTYPE_NAMES[tensor.dtype] != found[number].dtype:
                self.problems.append(f"{name!r} shares memory with {found[number].name!r} of another dtype")
            elif all(_view(tensor) != _view(other) for _, other in self.tensors[number]):
                self.tensors[number].append((name, tensor))
        self.found: tuple[Memory, ...] = tuple(found)
        self._others = {_key(t): name for name, t in attributes(model) if t.numel() and _readable(t)}

    def number(self, tensor: torch.Tensor) -> int | None:
        """Which storage of weights `tensor` lies in."""
        return self._numbers.get(_key(tensor)) if _readable(tensor) else None

    def fits(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether `tensor` counts elements as memory `number` does."""
        return DTYPE_NAMES.get(tensor.dtype) == self.found[number].dtype

    def is_live(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in any memory of the model: weights, other buffers, tensors kept as attributes."""
        return _readable(tensor) and (_key(tensor) in self._numbers or _key(tensor) in self._others)

    def name(self, tensor: torch.Tensor) -> str:
        """For messages: whose memory `tensor` lies in."""
        number = self.number(tensor)
        if number is not None:
            return repr(self.found[number].name)
        if _readable(tensor) and _key(tensor) in self._others:
            return repr(self._others[_key(tensor)])
        return "a temporary tensor"


def weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer by name, tied ones once per name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        named: dict[str, torch.Tensor | None] = {**module._parameters}
        named |= {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in named.items():
            if tensor is not None:
                yield f"{prefix}.{key}" if prefix else key, tensor


def attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Other tensors that modules hold: non-persistent buffers, and plain attributes, also in lists and dicts."""
    for prefix, module in model.named_modules():
        named: dict[str, Any] = {k: module._buffers[k] for k in module._non_persistent_buffers_set}
        named |= {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        for key, value in named.items():
            values = (
                value
                if isinstance(value, list | tuple)
                else list(value.values())
                if isinstance(value, dict)
                else [value]
            )
            for tensor in values:
                if isinstance(tensor, torch.Tensor):
                    yield f"{prefix}.{key}" if prefix else key, tensor


def _readable(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta" and not _wrapper(tensor)


def _wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no memory of its own to speak of."""
    return type(tensor.data) is not torch.Tensor


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _unfit(tensor: torch.Tensor) -> str | None:
    if tensor.device.type == "meta":
        return "has no memory (meta device)"
    if _wrapper(tensor):
        return f"is a {type(tensor.data).__name__}, which cannot be written element by element"
    if tensor.dtype not in DTYPE_NAMES:
        return f"has dtype {tensor.dtype}, which is not synced (a quantized layer?)"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "is expanded: several elements share one place in memory"
    return None
