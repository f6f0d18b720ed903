"""Which live tensors of a module hold each canonical tensor of a catalog."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from chunkstore.torch_dtypes import DTYPE_NAMES
from manifest.catalog import Catalog
from manifest.naming import canonical_tensors
from manifest.peft_names import ActiveAdapter, peft_models
from subscriber.errors import EngineMismatch, name_offenders


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Canonical tensor `name`, and every separate piece of memory in the module that holds it.

    One copy as a rule; more where the checkpoint ties names that the module keeps apart.
    """

    name: str
    copies: tuple[torch.Tensor, ...]


def reader(module: nn.Module) -> Callable[[], dict[str, torch.Tensor]]:
    """Reads what of `module` a stream holds, live and by name: parameters and persistent buffers.

    Of a PEFT model the adapter that is active now; the base is nobody's but the module's. That raises EngineMismatch if
    adapters are switched or merged in place, this if several are active.
    """
    models = peft_models([module])
    if not models:
        return partial(canonical_tensors, module)
    if len(models) > 1:
        raise EngineMismatch(f"the module has {len(models)} PeftModels", hint="give the engine one of them")
    return ActiveAdapter(models[0], EngineMismatch).tensors


def live_tensors(live: dict[str, torch.Tensor], catalog: Catalog) -> list[LiveTensor]:
    """`live` in catalog order.

    Raises EngineMismatch naming every tensor that is missing, surplus, of another dtype or shape, or that cannot be
    written in place.
    """
    live = dict(live)
    names: list[list[str]] = [[spec.name] for spec in catalog.tensors]
    for alias, name in catalog.aliases.items():
        names[catalog.ids[name]].append(alias)
    problems: list[str] = []
    out: list[LiveTensor] = []
    owners: dict[tuple[torch.device, int], str] = {}
    for spec, known_as in zip(catalog.tensors, names, strict=True):
        found = [(name, live.pop(name)) for name in known_as if name in live]
        if not found:
            problems.append(f"{spec.name!r} is missing from the module")
        copies: dict[tuple[torch.device, int], torch.Tensor] = {}
        for name, tensor in found:
            problem = _unfit(tensor, spec.dtype, spec.shape)
            if problem:
                problems.append(f"{name!r} {problem}")
                continue
            place = (tensor.device, tensor.data_ptr() if spec.numel else id(tensor))
            if owners.setdefault(place, spec.name) != spec.name:
                problems.append(
                    f"{name!r} shares its memory with {owners[place]!r}, which the catalog keeps apart"
                )
            first = copies.setdefault(place, tensor)
            if _steps(first) != _steps(tensor):
                problems.append(
                    f"{name!r} is {spec.name!r} in another layout of the same memory, not the same values"
                )
        out.append(LiveTensor(spec.name, tuple(copies.values())))
    problems += [f"{name!r} is in the module but not in the catalog" for name in live]
    if problems:
        raise EngineMismatch(
            f"the module does not fit the stream's catalog: {name_offenders(problems)}",
            hint="build the module from the trained model's config, in its inference dtype",
        )
    return out


def _steps(tensor: torch.Tensor) -> list[int]:
    """Elements in memory from one index to the next, where there is a next."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _unfit(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> str | None:
    found = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    if found != dtype:
        return f"has dtype {found}, the catalog says {dtype}"
    if tuple(tensor.shape) != shape:
        return f"has shape {tuple(tensor.shape)}, the catalog says {shape}"
    if type(tensor.data) is not torch.Tensor:
        return f"is a {type(tensor.data).__name__}, which cannot be written element by element"
    if tensor.device.type == "meta":
        return "has no memory (meta device)"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "is expanded: several elements share one place in memory"
    return None
