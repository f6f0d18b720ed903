"""Own re-implementations of how public systems store changed bf16 weights, for comparison by size and speed.

Each takes one tensor's bits before and after, and the flat indices that differ, and returns the bytes it would store.
They keep to the described layouts; containers, names and shapes are left out, in the formats' favour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

U16 = npt.NDArray[np.uint16]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Change:
    """One tensor before and after: flat bits, the flat indices that differ, and the length of its rows."""

    old: U16
    new: U16
    at: Indices
    columns: int


def raw(change: Change) -> bytes:
    """int32 flat index and bf16 value of each element."""
    return change.at.astype("<i4").tobytes() + change.new[change.at].tobytes()


def grail(change: Change) -> bytes:
    """grail v3.1: row steps; column steps, which start anew in each row; values."""
    rows, columns = np.divmod(change.at, change.columns)
    row_steps = np.diff(rows, prepend=0)
    same_row = np.zeros(len(rows), np.bool_)
    same_row[1:] = row_steps[1:] == 0
    column_steps = np.where(same_row, np.diff(columns, prepend=0), columns)
    return _narrow(row_steps) + _narrow(column_steps) + change.new[change.at].tobytes()


def nemo_absolute(change: Change) -> bytes:
    """NeMo: 16-bit gaps (32 where one is larger) and values."""
    return _gaps(change) + change.new[change.at].tobytes()


def nemo_xor(change: Change) -> bytes:
    """NeMo: the same, with old xor new instead of values."""
    return _gaps(change) + (change.old[change.at] ^ change.new[change.at]).tobytes()


def xor_dense(change: Change) -> bytes:
    """Old xor new of every element."""
    return (change.old ^ change.new).tobytes()


def overwrite(change: Change) -> bytes:
    """slime: positions of the bytes that differ, as 32 bits, and those bytes."""
    old, new = change.old.view(np.uint8), change.new.view(np.uint8)
    at = np.flatnonzero(old != new)
    return at.astype("<u4").tobytes() + new[at].tobytes()


def zstd(encode: Callable[[Change], bytes]) -> Callable[[list[Change]], int]:
    """The size of all tensors' bytes, compressed together with zstd-1."""
    return lambda changes: len(zstandard.ZstdCompressor(level=1).compress(b"".join(map(encode, changes))))


FORMATS: Final[dict[str, Callable[[list[Change]], int]]] = {
    "raw int32 + bf16": lambda changes: sum(len(raw(change)) for change in changes),
    "raw int32 + bf16, zstd-1": zstd(raw),
    "grail v3.1": zstd(grail),
    "NeMo gap16 + abs": zstd(nemo_absolute),
    "NeMo gap16 + xor": zstd(nemo_xor),
    "xor dense + zstd-1": zstd(xor_dense),
    "slime overwrite": zstd(overwrite),
}
"""Bytes of one change set in each public format."""


def _narrow(steps: Indices) -> bytes:
    top = int(steps.max(initial=0))
    return steps.astype("<u1" if top < 1 << 8 else "<u2" if top < 1 << 16 else "<u4").tobytes()


def _gaps(change: Change) -> bytes:
    gaps = np.diff(change.at, prepend=-1) - 1
    return gaps.astype("<u2" if int(gaps.max(initial=0)) < 1 << 16 else "<u4").tobytes()
