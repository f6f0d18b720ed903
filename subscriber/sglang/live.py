"""Read and write live weights by their place in memory, on whatever device they lie. Runs inside SGLang's scheduler."""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import torch
from torch import nn

from chunkstore import digest_torch
from chunkstore.dtypes import BITS, Bits
from chunkstore.regions import Indices
from chunkstore.torch_dtypes import BIT_DTYPES
from subscriber.errors import EngineChanged
from subscriber.sglang.boxes import Box, BoxMap
from subscriber.sglang.wire import Piece

_PART: Final = 1 << 18  # elements per temporary where a box has to be read row by row
_BLOCK: Final = 1 << 14  # elements on the host whose cache lines are still near when they are read back
_SIGNED: Final = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_MASK: Final = (1 << 64) - 1


class LiveMemories:
    """The storages that a map names, as flat vectors of bits.

    They are looked up anew for every use, for anyone may have replaced a parameter's tensor since the map was made.
    `on_host`: none of them lies on a device.
    """

    def __init__(self, model: nn.Module, map_: BoxMap) -> None:
        self._model, self._map = model, map_
        tensors = self._tensors()
        self.on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        self._addresses = [_address(tensor) for tensor in tensors]

    def vectors(self) -> list[torch.Tensor]:
        """One vector per memory of the map; int16 for two-byte elements and so on. Raises EngineChanged."""
        tensors = self._tensors()
        moved = [
            memory.name
            for memory, tensor, address in zip(self._map.memories, tensors, self._addresses, strict=True)
            if _address(tensor) != address
        ]
        if moved:
            raise EngineChanged(
                f"{', '.join(moved[:20])} lie elsewhere in memory than when they were mapped",
                hint="something has replaced the model's tensors; the subscriber maps them again by itself",
            )
        return [_flat(tensor) for tensor in tensors]

    def _tensors(self) -> list[torch.Tensor]:
        named: Mapping[str, torch.Tensor] = {
            **dict(self._model.named_buffers(remove_duplicate=False)),
            **dict(self._model.named_parameters(remove_duplicate=False)),
        }
        return [named[memory.name].detach() for memory in self._map.memories]


Block = tuple[slice | torch.Tensor, torch.Tensor]
"""Some elements of a piece: a range of its memory, or where runs begin, int64 on the host; and their bits."""


def cut(piece: Piece, targets: Indices, bits: Bits, *, on_host: bool) -> list[Block]:
    """All elements of `piece` with their bits: in small blocks for memory `on_host`, in one for a device."""
    values = torch.from_numpy(bits.view(_SIGNED[bits.itemsize]))
    size = _BLOCK if on_host else max(1, piece.elements)
    if piece.count == 1:
        start, parts = int(targets[0]), torch.split(values, size)
        return [(slice(start + n * size, start + n * size + len(p)), p) for n, p in enumerate(parts)]
    runs = max(1, size // piece.run)
    starts = torch.split(torch.from_numpy(targets), runs)
    return list(zip(starts, torch.split(values, runs * piece.run), strict=True))


def gather(memory: torch.Tensor, piece: Piece, targets: Indices) -> Bits:
    """The bits of `piece`'s elements, in its order, on the host."""
    where = (
        slice(int(targets[0]), int(targets[0]) + piece.run) if piece.count == 1 else torch.from_numpy(targets)
    )
    host = _read(memory, _places(memory, piece, where)).cpu().contiguous().numpy()
    return host.view(BITS[memory.element_size()])


def write(memory: torch.Tensor, piece: Piece, blocks: list[Block]) -> bool:
    """Write `blocks` of `piece`; whether the memory holds them afterwards."""
    for where, bits in blocks:
        places, new = _places(memory, piece, where), bits.to(memory.device)
        if isinstance(places, slice):
            memory[places] = new
        else:
            memory.scatter_(0, places, new)  # twice as fast as indexing, on one thread
        if not torch.equal(_read(memory, places), new):
            return False
    return True


def holds(memory: torch.Tensor, piece: Piece, blocks: list[Block]) -> bool:
    """Whether `blocks` of `piece` have their bits in this memory."""
    return all(
        torch.equal(_read(memory, _places(memory, piece, where)), bits.to(memory.device))
        for where, bits in blocks
    )


def digest(name: str, memory: torch.Tensor, box: Box) -> int:
    """Partial digest of canonical tensor `name` over the elements of `box`; in [0, 2⁶⁴)."""
    total = 0
    for source, target, size, source_stride, target_stride in _parts(box):
        view = torch.as_strided(memory, size, target_stride, target)
        if source_stride in ((), (1,)):
            total += digest_torch.digest(name, view, source)
            continue
        indices = torch.tensor(source, device=memory.device)
        for n, stride in zip(size, source_stride, strict=True):
            indices = indices[..., None] + torch.arange(n, device=memory.device) * stride
        total += digest_torch.digest_at(name, indices.reshape(-1), view.reshape(-1))
    return total & _MASK


def synchronize(vectors: list[torch.Tensor]) -> None:
    """Wait until nothing that was started on the devices reads or writes any more."""
    for device in {vector.device for vector in vectors if vector.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


_Part = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _parts(box: Box) -> Iterator[_Part]:
    """Cut a box along its outer dimensions into parts that are contiguous, or small."""
    if box.contiguous or box.numel <= _PART:
        yield box.source, box.target, box.size, box.source_stride, box.target_stride
        return
    step = max(1, _PART // (box.numel // box.size[0]))
    for first in range(0, box.size[0], step):
        n = min(step, box.size[0] - first)
        yield from _parts(
            Box.of(
                box.tensor,
                box.memory,
                box.source + first * box.source_stride[0],
                box.target + first * box.target_stride[0],
                (n, *box.size[1:]),
                box.source_stride,
                box.target_stride,
            )
        )


def _places(memory: torch.Tensor, piece: Piece, where: slice | torch.Tensor) -> slice | torch.Tensor:
    """Of all elements of a block."""
    if isinstance(where, slice):
        return where
    starts = where.to(memory.device)
    if piece.run == 1:
        return starts
    return (starts[:, None] + torch.arange(piece.run, device=memory.device)).reshape(-1)


def _read(memory: torch.Tensor, places: slice | torch.Tensor) -> torch.Tensor:
    return memory[places] if isinstance(places, slice) else memory.gather(0, places)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.element_size()
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // size,), (1,), 0)
    return whole.view(BIT_DTYPES[size])


def _address(tensor: torch.Tensor) -> tuple[int, int, str]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes(), str(tensor.dtype)
