"""Canonical names of a torch module's parameters and persistent buffers, the same on both sides of a stream.

Wrappers add path segments that no checkpoint knows: DistributedDataParallel, DataParallel, DeepSpeed's engine `module`,
torch.compile `_orig_mod`, activation checkpointing `_checkpoint_wrapped_module`. They are dropped because of what the
wrapper *is*, wherever it stands; a layer that merely is called `module` keeps its name.
"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrapped(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None for any other module."""
    inner: nn.Module | None = None
    # Importing dynamo takes a second; what only an imported module can make exists only where it is imported already.
    dynamo = sys.modules.get("torch._dynamo")
    recompute = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    deepspeed = sys.modules.get("deepspeed.runtime.engine")
    if isinstance(module, DistributedDataParallel | DataParallel):
        inner = module.module
    elif dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        inner = module._orig_mod
    elif recompute is not None and isinstance(module, recompute.ActivationWrapper):
        inner = module._checkpoint_wrapped_module
    elif deepspeed is not None and isinstance(module, deepspeed.DeepSpeedEngine):
        inner = module.module
    return inner


Inside = Callable[[nn.Module], nn.Module | None]
"""What stands for a module in names; None: it itself."""


def canonical_tensors(model: nn.Module, inside: Inside = unwrapped) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer by canonical name, in module order; tied ones once per name."""
    return dict(_walk(model, "", inside))


def _walk(module: nn.Module, prefix: str, inside: Inside) -> Iterator[tuple[str, torch.Tensor]]:
    inner = inside(module)
    if inner is not None:
        yield from _walk(inner, prefix, inside)
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer
    for name, child_module in module._modules.items():
        if child_module is not None:
            yield from _walk(child_module, f"{prefix}{name}.", inside)
