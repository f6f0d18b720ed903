"""Fixed-width bit packing, vectorised: value i takes bits i·w … i·w + w − 1 of a little-endian bit stream.

Eight values at a time move through one 64-bit word, since eight values of w bits are exactly w bytes.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

# Fields of 8, 16 and 32 bits inside a word, each with the mask of its low half's fields.
_HALVES: Final = ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))
_UNITS: Final[dict[int, np.dtype[Any]]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


def packed_size(count: int, width: int) -> int:
    """Bytes of `count` packed values of `width` bits."""
    return (count * width + 7) // 8


def pack(values: U8, width: int) -> bytes:
    """Pack the low `width` (1 to 8) bits of each value; the other bits must be zero. Unused bits are zero."""
    if width == 8:
        return values.tobytes()
    words = _words(values)
    for size, low in _HALVES:  # join neighbours: fields of width·size/8 bits in slots of `size` bits
        high = words & ~np.uint64(low)
        high >>= np.uint64(size - size * width // 8)
        words = words & np.uint64(low)
        words |= high
    return _fields(words, width).tobytes()[: packed_size(len(values), width)]


def unpack(data: npt.NDArray[np.uint8], count: int, width: int) -> U8:
    """The inverse of `pack`: `count` values from `packed_size(count, width)` bytes."""
    if width == 8:
        return data[:count]
    words = np.zeros(-(-count // 8), dtype="<u8")
    fields = _fields(words, width)
    whole = len(data) // width
    fields[:whole] = data[: whole * width].view(fields.dtype).reshape(fields[:whole].shape)
    if whole < len(words):
        rest = data[whole * width :]
        words.view(np.uint8)[8 * whole : 8 * whole + len(rest)] = rest
    for size, low in reversed(_HALVES):
        half = size * width // 8  # bits of one field
        field = np.uint64(low & _repeat((1 << half) - 1, 2 * size))
        high = words << np.uint64(size - half)
        high &= field << np.uint64(size)
        words &= field
        words |= high
    return words.view(np.uint8)[:count]


def _fields(words: npt.NDArray[np.uint64], width: int) -> npt.NDArray[Any]:
    """A view of the first `width` bytes of each word: as one number where there is one of that size, which copies
    much faster than a few bytes.
    """
    unit = _UNITS.get(width)
    if unit is None:
        return words.view(np.uint8).reshape(-1, 8)[:, :width]
    return words.view(unit)[:: 8 // width]


def _words(values: U8) -> npt.NDArray[np.uint64]:
    padded = values if len(values) % 8 == 0 else np.pad(values, (0, -len(values) % 8))
    return np.ascontiguousarray(padded).view("<u8")


def _repeat(pattern: int, every: int) -> int:
    """`pattern` at each multiple of `every` bits of a word."""
    return sum(pattern << at for at in range(0, 64, every))
