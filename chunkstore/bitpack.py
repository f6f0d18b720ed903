"""Fixed-width bit packing, vectorised: value i takes bits i·w … i·w + w − 1 of a little-endian bit stream.

Eight values at a time move through one 64-bit word, since eight values of w bits are exactly w bytes.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

# Fields of 8, 16 and 32 bits inside a word, each with the mask of its low half's fields.
_HALVES: Final = ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))


def packed_size(count: int, width: int) -> int:
    """Bytes of `count` packed values of `width` bits."""
    return (count * width + 7) // 8


def pack(values: U8, width: int) -> bytes:
    """Pack the low `width` (1 to 8) bits of each value; the other bits must be zero. Unused bits are zero."""
    if width == 8:
        return values.tobytes()
    words = _words(values)
    for size, low in _HALVES:  # join neighbours: fields of width·size/8 bits in slots of `size` bits
        words = (words & np.uint64(low)) | ((words & ~np.uint64(low)) >> np.uint64(size - size * width // 8))
    kept = words.view(np.uint8).reshape(-1, 8)[:, :width]
    return kept.tobytes()[: packed_size(len(values), width)]


def unpack(data: npt.NDArray[np.uint8], count: int, width: int) -> U8:
    """The inverse of `pack`: `count` values from `packed_size(count, width)` bytes."""
    if width == 8:
        return data[:count]
    groups = -(-count // 8)
    slots = np.zeros((groups, 8), dtype=np.uint8)
    whole = len(data) // width
    slots[:whole, :width] = data[: whole * width].reshape(whole, width)
    if whole < groups:
        slots[whole, : len(data) - whole * width] = data[whole * width :]
    words = slots.view("<u8").reshape(-1)
    for size, low in reversed(_HALVES):
        half = size * width // 8  # bits of one field
        field = np.uint64(low & _repeat((1 << half) - 1, 2 * size))
        words = (words & field) | ((words << np.uint64(size - half)) & (field << np.uint64(size)))
    return words.view(np.uint8)[:count]


def _words(values: U8) -> npt.NDArray[np.uint64]:
    padded = values if len(values) % 8 == 0 else np.pad(values, (0, -len(values) % 8))
    return np.ascontiguousarray(padded).view("<u8")


def _repeat(pattern: int, every: int) -> int:
    """`pattern` at each multiple of `every` bits of a word."""
    return sum(pattern << at for at in range(0, 64, every))
