"""The digest of a tensor's bits (see `chunkstore.digest`) with torch, on the device the bits are on.

Plain int64 arithmetic, which wraps as uint64 does; temporaries are bounded whatever the size of the tensor.
Functions take tensors of any dtype and read their bits; a tensor that is not contiguous is copied.
"""

import threading
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from chunkstore.digest import ROW, ROW_BITS, U64, Coefficients, lanes_per_element, row_pieces
from chunkstore.regions import Region

_CPU_ROWS: Final = 32  # rows per temporary: 1 MiB of int64, which a core's cache holds
_DEVICE_ROWS: Final = 1 << 12  # 128 MiB of int64: enough to fill a large device
_PIECE: Final = 1 << 16  # scattered lanes per temporary on the CPU
_DEVICE_PIECE: Final = 1 << 22
_MASK: Final = (1 << 64) - 1


class _Scratch(threading.local):
    """A thread's temporary on the CPU: a fresh one for each use would leave holes between what others allocate."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # or it could not be written outside that mode later
            self.rows = torch.empty(_CPU_ROWS * ROW, dtype=torch.int64, device="cpu")


_SCRATCH: Final = _Scratch()


def digest(name: str, bits: torch.Tensor, start: int = 0) -> int:
    """Partial digest of a contiguous run of elements of tensor `name`, from flat element index `start`.

    `bits`: any dtype and shape, read row-major. Returns an int in [0, 2⁶⁴); waits for the device.
    """
    sums = _row_digests(Coefficients.of(name), bits, start)
    return int(sums.sum().item()) & _MASK


def digest_at(name: str, indices: torch.Tensor, bits: torch.Tensor) -> int:
    """Partial digest of scattered elements: `bits[i]` is the pattern of flat element index `indices[i]`.

    `indices`: int64, one-dimensional, on the device of `bits`, no index twice; `bits`: as long, any dtype.
    """
    if len(indices) != len(bits):
        raise ValueError(f"{len(indices)} indices but {len(bits)} elements")
    coefficients = Coefficients.of(name)
    per, c = lanes_per_element(bits.element_size()), _to(coefficients.c, bits.device)
    piece = _PIECE if bits.device.type == "cpu" else _DEVICE_PIECE
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for i in range(0, len(indices), piece):
        at = indices[i : i + piece]
        if per > 1:
            at = (at[:, None] * per + torch.arange(per, device=at.device)).reshape(-1)
        total += (_weights(coefficients, at, c) * _lanes(bits[i : i + piece]).to(torch.int64)).sum()
    return int(total.item()) & _MASK


def block_digests(
    coefficients: Coefficients, bits: torch.Tensor, start: int = 0, block: int = 16384
) -> torch.Tensor:
    """One partial digest per block of `block` elements of a contiguous run; the last block may be short.

    Block b holds elements b·block … (b+1)·block − 1 of `bits`, whose flat indices begin at `start`.
    Returns int64 (the digest's 64 bits, signed), shape [⌈numel / block⌉], on the device of `bits`.
    Fast where `start` and `block` fill whole rows of 4096 lanes, right everywhere.
    """
    per = lanes_per_element(bits.element_size())
    if (start * per) % ROW or (block * per) % ROW:
        return _unaligned_block_digests(coefficients, bits, start, block)
    rows = _row_digests(coefficients, bits, start)
    each = block * per // ROW
    whole = len(rows) // each * each
    sums = rows[:whole].reshape(-1, each).sum(1)
    return sums if whole == len(rows) else torch.cat([sums, rows[whole:].sum().reshape(1)])


def _row_digests(coefficients: Coefficients, bits: torch.Tensor, start: int) -> torch.Tensor:
    """The partial digest of each row of 4096 lanes that the run touches; int64."""
    lanes = _lanes(bits)
    first = start * lanes_per_element(bits.element_size())
    first_row, last_row = first >> ROW_BITS, (first + len(lanes) - 1) >> ROW_BITS
    sums = torch.empty(last_row - first_row + 1 if len(lanes) else 0, dtype=torch.int64, device=bits.device)
    c = _to(coefficients.c, bits.device)
    done = 0
    max_rows = _CPU_ROWS if bits.device.type == "cpu" else _DEVICE_ROWS
    for row, column, rows, width in row_pieces(first, len(lanes), max_rows):
        lane_rows = lanes[done : done + rows * width].view(rows, width)
        if bits.device.type == "cpu":
            block = _SCRATCH.rows[: rows * width].view(rows, width).copy_(lane_rows)
        else:
            block = lane_rows.to(torch.int64)
        block *= c[column : column + width]
        torch.sum(block, dim=1, out=sums[row - first_row : row - first_row + rows])
        done += rows * width
    return sums.mul_(_to(coefficients.a_run(first_row, len(sums)), bits.device))


def box_block_digests(
    coefficients: Coefficients, bits: torch.Tensor, box: Region, start: int = 0, block: int = 16384
) -> torch.Tensor:
    """The same of elements that do not lie together: those number `start` and up of `box`, in its order."""

    def lanes_of(first: int, last: int) -> torch.Tensor:
        return _lane_indices(box, start + first, start + last, per, bits.device)

    per = lanes_per_element(bits.element_size())
    return _block_digests_at(coefficients, bits, block, lanes_of)


def _lane_indices(box: Region, first: int, last: int, per: int, device: torch.device) -> torch.Tensor:
    """The lanes of elements number `first` … `last` of `box`, `per` of each."""
    positions = torch.arange(first, last, device=device)
    at = torch.full_like(positions, box.start)
    for size, stride in zip(reversed(box.size), reversed(box.stride), strict=True):
        at += (positions % size) * stride
        positions = positions // size
    return at if per == 1 else (at[:, None] * per + torch.arange(per, device=device)).reshape(-1)


def _unaligned_block_digests(
    coefficients: Coefficients, bits: torch.Tensor, start: int, block: int
) -> torch.Tensor:
    per = lanes_per_element(bits.element_size())

    def lanes_of(first: int, last: int) -> torch.Tensor:
        return torch.arange((start + first) * per, (start + last) * per, device=bits.device)

    return _block_digests_at(coefficients, bits, block, lanes_of)


def _block_digests_at(
    coefficients: Coefficients,
    bits: torch.Tensor,
    block: int,
    lanes_of: Callable[[int, int], torch.Tensor],
) -> torch.Tensor:
    """Block digests where `lanes_of` tells the lanes of a run of elements, counted within `bits`."""
    lanes, c = _lanes(bits), _to(coefficients.c, bits.device)
    per = lanes_per_element(bits.element_size())
    each, count = block * per, len(lanes) // per
    piece = block * max(1, (_PIECE if bits.device.type == "cpu" else _DEVICE_PIECE) // each)
    sums = [torch.empty(0, dtype=torch.int64, device=bits.device)]
    for first in range(0, count, piece):
        last = min(first + piece, count)
        part = lanes[first * per : last * per].to(torch.int64)
        part *= _weights(coefficients, lanes_of(first, last), c)
        part = torch.nn.functional.pad(part, (0, -len(part) % each))
        sums.append(part.reshape(-1, each).sum(1))
    return torch.cat(sums)


def _weights(coefficients: Coefficients, at: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """A·C of each lane index in `at` (not empty); int64."""
    rows = at >> ROW_BITS
    low, high = (int(x) for x in torch.stack(torch.aminmax(rows)).tolist())
    if high - low < max(len(rows), ROW):
        a = _to(coefficients.a_run(low, high - low + 1), at.device)[rows - low]
    else:  # far apart: a table could be larger than the work itself
        a = _to(coefficients.a(rows.cpu().numpy().astype(np.uint64)), at.device)
    return a * c[at & (ROW - 1)]


def _to(values: U64, device: torch.device) -> torch.Tensor:
    return torch.tensor(values.view(np.int64), device=device)


def _lanes(bits: torch.Tensor) -> torch.Tensor:
    flat = bits.detach().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # views need stride 1, which empty tensors may lack
    return flat.view(torch.uint8 if flat.element_size() == 1 else torch.uint16)
