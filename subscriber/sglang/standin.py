"""Stand-ins for checkpoint tensors: all of the geometry, none of the memory.

A stand-in is a wrapper subclass of torch.Tensor, whose operations come to `__torch_dispatch__` on whatever thread the
loader runs them; a dispatch mode would be left behind on the thread that entered it. Views are computed on the meta
device. Copies and joins make new geometry. A copy into live memory is recorded and not done. Anything else (arithmetic,
reading a value, changing the dtype) says something about values, which a stand-in cannot follow, and is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch.utils._pytree import tree_map

from chunkstore.torch_dtypes import DTYPE_NAMES
from subscriber.sglang.boxes import Box
from subscriber.sglang.compose import ZEROS, Copy, NotBoxes, compose

aten = torch.ops.aten

_VIEWS: Final = frozenset({
    aten.alias.default, aten.as_strided.default, aten.detach.default, aten.diagonal.default, aten.expand.default,
    aten.lift_fresh.default, aten.permute.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.t.default,
    aten.transpose.int, aten.unbind.int, aten.unsqueeze.default, aten.view.default,
    aten._reshape_alias.default, aten._unsafe_view.default,
})  # fmt: skip
_COPIES: Final = frozenset({aten.clone.default, aten._to_copy.default})


class Recorder(Protocol):
    """What stand-ins report to; called from any thread of the loader."""

    def write(self, target: torch.Tensor, source: "StandIn") -> None:
        """`target.copy_(source)`, of equal shape, happens."""

    def refuse(self, pieces: Sequence[Box], why: str) -> Exception:
        """Note that the tensors in `pieces` cannot be followed, and return what to raise."""


class StandIn(torch.Tensor):
    """A view of memory that exists only as geometry.

    `meta`: shape, strides, offset and dtype of the view. `pieces`: which canonical elements lie where in the memory.
    """

    meta: torch.Tensor
    pieces: tuple[Box, ...]
    recorder: Recorder

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    @staticmethod
    def __new__(
        cls,
        meta: torch.Tensor,
        pieces: tuple[Box, ...],
        recorder: Recorder,
        device: torch.device | str = "cpu",
    ) -> "StandIn":
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device(device),
        )
        assert isinstance(out, StandIn)
        torch._C._set_throw_on_mutable_data_ptr(
            out
        )  # there is no data; who asks for its address must not get one
        out.meta, out.pieces, out.recorder = meta, pieces, recorder
        return out

    @classmethod
    def whole(cls, tensor: int, shape: tuple[int, ...], dtype: torch.dtype, recorder: Recorder) -> "StandIn":
        """Canonical tensor number `tensor`."""
        meta = torch.empty(shape, dtype=dtype, device="meta")
        pieces = (Box.of(tensor, 0, 0, 0, shape, meta.stride(), meta.stride()),) if meta.numel() else ()
        return cls(meta, pieces, recorder)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has parameters that only its own printing uses
        return f"StandIn(shape={tuple(self.meta.shape)}, dtype={self.meta.dtype}, pieces={len(self.pieces)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the function
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default and isinstance(args[1], StandIn) and not isinstance(args[0], StandIn):
            return _copy_into(args[0], args[1])
        if func in _VIEWS:
            source: StandIn = args[0]
            return tree_map(
                lambda out: StandIn(out, source.pieces, source.recorder, source.device),
                func(source.meta, *args[1:], **kwargs),
            )
        if func in _COPIES:
            return _copy_of(func, args[0], args[1:], kwargs)
        if func is aten.cat.default or func is aten.stack.default:
            return _join(func, *args, **kwargs)
        if not func._schema.is_mutable:  # type: ignore[attr-defined]  # torch does not type its overloads
            # In inference mode composite operations arrive whole.
            out = func.decompose(*args, **kwargs)  # type: ignore[attr-defined]
            if out is not NotImplemented:
                return out
        found: list[StandIn] = []
        tree_map(lambda a: found.append(a) if isinstance(a, StandIn) else None, (args, kwargs))
        raise found[0].recorder.refuse(
            [piece for one in found for piece in one.pieces], f"goes through {func}, which cannot be followed"
        )


def _copy_into(target: torch.Tensor, source: StandIn) -> torch.Tensor:
    if target.shape != source.shape:
        raise source.recorder.refuse(
            source.pieces, f"has shape {tuple(source.shape)} where the engine has {tuple(target.shape)}"
        )
    source.recorder.write(target, source)
    return target


def _copy_of(
    func: Callable[..., Any], source: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StandIn:
    """A contiguous, or another, copy of all of `source` in new memory."""
    device = kwargs.get("device") or source.device
    layout = {key: value for key, value in kwargs.items() if key in ("dtype", "memory_format")}
    meta = func(source.meta, *args, **layout)
    if meta.dtype != source.dtype:
        raise source.recorder.refuse(
            source.pieces, f"is converted from {_name(source.dtype)} to {_name(meta.dtype)} on the way"
        )
    return StandIn(meta, moved(source, meta), source.recorder, device)


def _join(func: Callable[..., Any], tensors: Sequence[torch.Tensor], dim: int = 0) -> StandIn:
    """`cat` or `stack` of stand-ins and zeros."""
    stand_ins = [t for t in tensors if isinstance(t, StandIn)]
    first = stand_ins[0]
    known = [piece for one in stand_ins for piece in one.pieces]
    meta = func([t.meta if isinstance(t, StandIn) else t.to("meta") for t in tensors], dim)
    if any(t.dtype != meta.dtype for t in tensors):
        raise first.recorder.refuse(known, f"is joined with tensors of other dtypes than {_name(meta.dtype)}")
    pieces: list[Box] = []
    start = 0
    for number, tensor in enumerate(tensors):
        if func is aten.stack.default:
            place = meta.select(dim, number)
        elif tensor.shape == (0,):  # torch lets such a one take part in any join
            continue
        else:
            place = meta.narrow(dim, start, tensor.shape[dim])
            start += tensor.shape[dim]
        if isinstance(tensor, StandIn):
            pieces += moved(tensor, place)
        elif not all_zeros(tensor):
            raise first.recorder.refuse(known, "is joined with values that are not in the checkpoint")
        elif place.numel():
            offset, none = place.storage_offset(), [0] * place.dim()
            pieces.append(Box.of(ZEROS, 0, 0, offset, place.shape, none, place.stride()))
    return StandIn(meta, tuple(pieces), first.recorder, first.device)


def moved(source: StandIn, target: torch.Tensor, memory: int = 0) -> tuple[Box, ...]:
    """Where the canonical elements of `source` lie after a copy to `target`, which has the same shape."""
    if not source.numel():
        return ()
    copy = Copy(
        int(source.meta.storage_offset()),
        int(target.storage_offset()),
        tuple(target.shape),
        source.meta.stride(),
        target.stride(),
    )
    try:
        return tuple(compose(source.pieces, copy, memory))
    except NotBoxes as error:
        raise source.recorder.refuse(source.pieces, str(error)) from error


def all_zeros(tensor: torch.Tensor) -> bool:
    """Whether every bit of `tensor` is zero; a negative zero is not."""
    return not bool(tensor.detach().reshape(-1).view(torch.uint8).any()) if tensor.numel() else True


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype))
