"""Run a model's own loader without letting it change anything.

Three things keep the live model as it is while its `load_weights` runs over stand-ins:

- Copies of stand-ins are recorded instead of done, by the stand-ins themselves (`standin`), on any thread.
- Writes without a stand-in (padding that a loader zeroes) meet a dispatch mode, which swallows and reports those into
  live memory. A mode acts on one thread only, so jobs that the loader hands to a thread pool run at once on this one.
  (No loader is known to start threads otherwise. One that did could write zeros for real, where it always does;
  anything else it wrote would show in the digests that follow a trace.)
- Whatever the loader assigns to modules, parameters and buffers is put back afterwards, and reported where a tensor
  was involved.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from subscriber.sglang.standin import StandIn

_ABSENT = object()


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Swallows in-place operations on live memory.

    `is_live` says whether a tensor lies in it; `report` gets the operation, the tensor that it would have changed,
    and all of its arguments, and raises if it cannot tell what the operation does.
    """

    def __init__(
        self,
        is_live: Callable[[torch.Tensor], bool],
        report: Callable[[Callable[..., Any], torch.Tensor, tuple[Any, ...]], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_live, self._report = is_live, report

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(t, StandIn) for t in types):
            live = [t for t in _written(func, args, kwargs) if self._is_live(t)]
            if live:
                for tensor in live:
                    self._report(func, tensor, args)
                return live[0]
        return func(*args, **kwargs)


def _written(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors that an operation changes, by its schema."""
    for number, name in _written_arguments(func):
        value = args[number] if number < len(args) else kwargs.get(name)
        yield from (t for t in (value if isinstance(value, list | tuple) else [value]) if t is not None)


@lru_cache(maxsize=1024)
def _written_arguments(func: Callable[..., Any]) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments  # type: ignore[attr-defined]  # torch does not type its overloads
    return tuple(
        (i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    )


@contextmanager
def inline_jobs(failed: Callable[[BaseException], None]) -> Iterator[None]:
    """Jobs that this thread submits to thread pools run at once; `failed` hears of those that raise."""
    me, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def inline(
        pool: ThreadPoolExecutor, job: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if threading.get_ident() != me:
            return submit(pool, job, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(job(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # as a pool does: whoever asks for the result gets it
            failed(error)
            future.set_exception(error)
        return future

    ThreadPoolExecutor.submit = inline  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


class Snapshot:
    """What a model's modules, parameters and buffers refer to, so that it can be put back. Copies no weights."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module, _dicts(module)) for name, module in model.named_modules()]
        tensors = {
            f"{name}.{key}" if name else key: tensor
            for name, module, _ in self._modules
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None
        }
        self._data = [(name, tensor, tensor.data) for name, tensor in tensors.items()]

    def restore(self) -> list[str]:
        """Put everything back. Returns what the loader did to tensors beyond writing into them."""
        problems = []
        for name, module, saved in self._modules:
            for now, before in zip(_dicts(module, copy=False), saved, strict=True):
                changed = [
                    key for key in {*now, *before} if now.get(key, _ABSENT) is not before.get(key, _ABSENT)
                ]
                if not changed:
                    continue
                problems += [
                    f"{name}.{key} is replaced or computed when weights are loaded, so that it would not follow them"
                    for key in sorted(changed)
                    if isinstance(now.get(key), torch.Tensor) or isinstance(before.get(key), torch.Tensor)
                ]
                now.clear()
                now.update(before)
        for name, tensor, data in self._data:
            if _place(tensor) != _place(data):
                tensor.data = data
                problems.append(f"{name} gets other memory when weights are loaded")
        return problems


def _dicts(module: nn.Module, copy: bool = True) -> list[dict[str, Any]]:
    found = [vars(module), module._parameters, module._buffers, module._modules]
    return [dict(one) for one in found] if copy else found


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    if isinstance(tensor.data, StandIn):
        return ("stand-in",)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
