"""Megatron-Core on a machine without CUDA: what it asks of torch.cuda is answered for the CPU.

Import this before anything of Megatron. For tests alone: nothing overlaps, nothing is captured, streams do nothing.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # it lists torch.cuda as it is, and transformers imports it
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_NEEDS_TRITON = "megatron.core.transformer.moe.ops.paged_stash"


class _Stream:
    """A stream or an event that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., "_Stream"]:
        return lambda *_, **__: self


class _OnCPU(TorchFunctionMode):
    """Factories that ask for CUDA get the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None: ...


def _type(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron tells parameters by `torch.cuda.BFloat16Tensor` and the like."""

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        if not isinstance(found, str) or "cuda" in found:  # a function mode calls it twice
            return found
        return found.replace("torch.", "torch.cuda.")

    return named


def _same(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return self


class _Kernels(ModuleType):
    """A module of kernels that nobody runs."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _patch() -> None:
    everything: Any = torch
    everything.compile = lambda function=None, **_: (
        function or (lambda f: f)
    )  # fusions run as they are written
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.synchronize = cuda.set_device = cuda.empty_cache = _nothing
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = [torch.default_generator]
    tensor: Any = torch.Tensor
    tensor.type = _type(tensor.type)
    tensor.cuda = _same


# The one module on the way to a model that cannot be imported without triton.
sys.modules[_NEEDS_TRITON] = _Kernels(_NEEDS_TRITON)
_patch()

import megatron.core.tensor_parallel.random as _random  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402

_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()


def _norm(make: Callable[..., Any]) -> Callable[..., Any]:
    """torch's norms, also where a rank has some of the tokens only: then their gradients are summed, as with TE's."""

    def made(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = make(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return made


WrappedTorchNorm.__new__ = _norm(WrappedTorchNorm.__new__)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Within, on this thread, Megatron makes its tensors on the CPU."""
    with _OnCPU():
        yield
