"""Read and write the bits of parts of one live tensor, on any device, contiguous or not."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from chunkstore import digest_torch
from chunkstore.codec import WINDOW
from chunkstore.dtypes import BITS, Bits
from chunkstore.torch_dtypes import BIT_DTYPES
from manifest.merge import Update

_STRIDED_PART: Final = 1 << 18  # elements per step where every index has to be unravelled
_MASK: Final = (1 << 64) - 1


def gather(tensor: torch.Tensor, update: Update) -> Bits:
    """The live bits of the elements that `update` would write, in its order, on the host."""
    bits = _bits(tensor)
    if bits.is_contiguous():
        flat = bits.view(-1)
        part = flat[update.start : update.stop]
        if update.offsets is not None:
            part = part[_to_device(update.offsets.astype(np.int64), bits.device)]
        return _to_host(part)
    parts = [_to_host(bits[where]) for where, _ in _strided(bits, update)]
    return np.concatenate(parts) if parts else np.empty(0, BITS[bits.element_size()])


def scatter(tensor: torch.Tensor, update: Update) -> None:
    """Write the values of `update` into `tensor` in place."""
    bits = _bits(tensor)
    values = torch.from_numpy(
        update.values.view(f"i{bits.element_size()}" if bits.element_size() > 1 else "u1")
    )
    values = values.to(bits.device)
    if not bits.is_contiguous():
        for where, part in _strided(bits, update):
            bits[where] = values[part]
    elif update.offsets is None:
        bits.view(-1)[update.start : update.stop] = values
    else:
        window = bits.view(-1)[update.start : update.stop]
        window[_to_device(update.offsets.astype(np.int64), bits.device)] = values


def digest(name: str, tensor: torch.Tensor) -> int:
    """The digest of the whole live tensor, in bounded memory."""
    bits = _bits(tensor)
    if bits.is_contiguous():
        return digest_torch.digest(name, bits)
    total = 0
    for start in range(0, bits.numel(), WINDOW):
        stop = min(start + WINDOW, bits.numel())
        window = Update(0, start, stop, None, np.empty(0, BITS[bits.element_size()]))
        live = gather(tensor, window)
        total += digest_torch.digest(name, torch.from_numpy(live.view(np.uint8)).view(bits.dtype), start)
    return total & _MASK


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(BIT_DTYPES[tensor.element_size()])


def _strided(bits: torch.Tensor, update: Update) -> Iterator[tuple[tuple[torch.Tensor, ...], slice]]:
    """Multi-dimensional indices of the elements of `update`, part by part, and where their values lie."""
    count = update.stop - update.start if update.offsets is None else len(update.offsets)
    for first in range(0, count, _STRIDED_PART):
        part = slice(first, min(first + _STRIDED_PART, count))
        if update.offsets is None:
            flat = torch.arange(update.start + part.start, update.start + part.stop, device=bits.device)
        else:
            flat = _to_device(update.offsets[part].astype(np.int64) + update.start, bits.device)
        yield torch.unravel_index(flat, bits.shape), part


def _to_device(indices: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(indices).to(device)


def _to_host(bits: torch.Tensor) -> Bits:
    host = bits.cpu().contiguous().numpy()
    return host.view(BITS[bits.element_size()])
