"""From a model to the catalog: which tensor is published under which name, in which dtype."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from chunkstore.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES
from manifest.catalog import Catalog, TensorSpec
from manifest.checkpoint import Checkpoint
from publisher.errors import MappingMismatch


def map_model(
    named: Mapping[str, torch.Tensor], checkpoint: Checkpoint | None, inference_dtype: str | None
) -> Catalog:
    """Match tensors by canonical name with the base checkpoint's names, shapes and dtypes, or cast all floats to
    `inference_dtype`.

    Exactly one of `checkpoint` and `inference_dtype` is given. Raises MappingMismatch naming every offender.
    """
    groups = _tied_groups(named)
    if checkpoint is not None:
        chosen = [_choose_from_files(names, tensor, checkpoint) for names, tensor in groups]
        _check_against_files(groups, chosen, checkpoint)
        dtypes = [checkpoint.tensors[name].dtype if name in checkpoint.tensors else "" for name in chosen]
    else:
        chosen = [_own_name(named, names, tensor) for names, tensor in groups]
        dtypes = [
            _inference_dtype(name, tensor, inference_dtype or "")
            for (_, tensor), name in zip(groups, chosen, strict=True)
        ]
    aliases = {a: name for (names, _), name in zip(groups, chosen, strict=True) for a in names if a != name}
    specs = [
        TensorSpec(name, dtype, tuple(tensor.shape))
        for (_, tensor), name, dtype in zip(groups, chosen, dtypes, strict=True)
    ]
    return Catalog.of(specs, aliases)


def check_still_fits(live: Mapping[str, torch.Tensor], catalog: Catalog) -> None:
    """Raise MappingMismatch naming every tensor of the model that is no longer what `catalog` was made from.

    Names, shapes, dtypes, and which names are one tensor: an alias that got memory of its own would never be sent.
    """
    problems = [
        f"{name} is new in the model"
        for name in live
        if name not in catalog.ids and name not in catalog.aliases
    ]
    for spec in catalog.tensors:
        tensor = live.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape:
            problems.append(f"{spec.name} is no longer a tensor of shape {spec.shape} in the model")
        elif not castable(tensor.dtype, spec.dtype):
            problems.append(f"{spec.name} is now {tensor.dtype} and cannot be sent as {spec.dtype}")
    for alias, name in catalog.aliases.items():
        if alias not in live or name not in live or not _same_elements(live[alias], live[name]):
            problems.append(f"{alias} is no longer the same tensor as {name}")
    if problems:
        raise MappingMismatch(
            "the model has changed since attach: " + "; ".join(problems[:30]),
            hint="a publisher follows one architecture; attach a new one, with a stream of its own",
        )


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.numel() > 0 and _identity(a) == _identity(b)) or (not a.numel() and not b.numel())


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.is_meta or is_traceable_wrapper_subclass(tensor):
        return (id(tensor),)  # there is no memory of its own to compare
    where = tensor.untyped_storage().data_ptr()
    return where, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _tied_groups(named: Mapping[str, torch.Tensor]) -> list[tuple[list[str], torch.Tensor]]:
    """Names that share one tensor, together: [([name, alias …], tensor), …]."""
    groups: dict[tuple[object, ...], tuple[list[str], torch.Tensor]] = {}
    for name, tensor in named.items():
        # Empty tensors have no address of their own; views count as tied only if they show the very same elements.
        identity = _identity(tensor) if tensor.numel() else (id(tensor),)
        names, first = groups.setdefault(identity, ([], tensor))
        names.append(name)
        if isinstance(tensor, nn.Parameter) and not isinstance(first, nn.Parameter):
            groups[identity] = (names, tensor)  # the one that an optimizer knows
    return list(groups.values())


def _own_name(named: Mapping[str, torch.Tensor], names: list[str], tensor: torch.Tensor) -> str:
    return next(name for name in names if named[name] is tensor)


def _choose_from_files(names: list[str], tensor: torch.Tensor, checkpoint: Checkpoint) -> str:
    return next((n for n in names if n in checkpoint.tensors), names[0])


def _check_against_files(
    groups: list[tuple[list[str], torch.Tensor]], chosen: list[str], checkpoint: Checkpoint
) -> None:
    problems = []
    for (_, tensor), name in zip(groups, chosen, strict=True):
        spec = checkpoint.tensors.get(name)
        if spec is None:
            problems.append(f"{name} is in the model but not in the files")
        elif spec.shape != tuple(tensor.shape):
            problems.append(f"{name} is {tuple(tensor.shape)} in the model, {spec.shape} in the files")
        elif not castable(tensor.dtype, spec.dtype):
            problems.append(f"{name} is {tensor.dtype} in the model, {spec.dtype} in the files")
    known = {name for names, _ in groups for name in names}
    problems += [
        f"{name} is in the files but not in the model" for name in checkpoint.tensors if name not in known
    ]
    if problems:
        raise MappingMismatch(
            f"the model does not match base checkpoint {checkpoint.directory}: " + "; ".join(problems[:30]),
            hint="base_checkpoint must be the Hugging Face folder of this very architecture",
        )


def castable(live: torch.dtype, wire: str) -> bool:
    """Floats may be cast to the wire's float; anything else must already be it."""
    wanted = TORCH_DTYPES[wire]
    return live == wanted or (live.is_floating_point and wanted.is_floating_point)


def _inference_dtype(name: str, tensor: torch.Tensor, inference_dtype: str) -> str:
    if tensor.is_floating_point():
        return inference_dtype
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        raise MappingMismatch(
            f"{name}: a tensor of dtype {tensor.dtype} cannot be published",
            hint="only real floats, integers and booleans are published; make it a non-persistent buffer",
        )
    return dtype


def verify_against_files(digests: list[int], catalog: Catalog, checkpoint: Checkpoint) -> None:
    """The independent check of the mapping: digests taken through it must equal those of the files.

    A wrong permutation moves data and digest together and would stay unnoticed for ever; the files know better.
    """
    wrong = [s.name for s, d in zip(catalog.tensors, digests, strict=True) if checkpoint.digest(s.name) != d]
    if wrong:
        raise MappingMismatch(
            f"{len(wrong)} of {len(catalog.tensors)} tensors differ from base checkpoint "
            f"{checkpoint.directory}: {', '.join(wrong[:10])}",
            hint="attach before the first optimizer step, and name the folder that the run's weights were loaded from",
        )
