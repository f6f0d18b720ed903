"""Differences of 16-bit floats (docs/FORMAT.md, "delta"): how many representable values a change moves by.

Bit patterns become integers that sort as the numbers do, and a change is the difference of those, mod 2¹⁶. It is
split into sign bits, 2-bit codes of magnitude − 1, and the rare magnitudes that are larger.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from chunkstore.bitpack import pack, packed_size, unpack
from chunkstore.dtypes import Bits

U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]

ESCAPE: Final = 3
"""Code of a magnitude that stands among the escapes; codes 0 to 2 are magnitudes 1 to 3."""

MAX_ESCAPE: Final = 0x8000 - ESCAPE - 1
"""A difference is at least −32768, so its magnitude − 1 − ESCAPE is at most this."""

_SIGN: Final = np.uint16(0x8000)
_CODE_BITS: Final = 2


def order(bits: Bits) -> U16:
    """Bit patterns (uint16) as integers that sort as the floats do: −0 directly below +0, NaNs at both ends."""
    mask: U16 = (bits.view(np.int16) >> 15).view(np.uint16)
    mask |= _SIGN
    mask ^= bits
    return mask


def unorder(order: U16) -> U16:
    """The inverse of `order`."""
    mask: U16 = (~order.view(np.int16) >> 15).view(np.uint16)
    mask |= _SIGN
    mask ^= order
    return mask


def difference(new: Bits, old: Bits) -> U16:
    """What to `add` to `old` to get `new`; 0 only where they are equal."""
    out = order(new)
    out -= order(old)
    return out


def add(old: Bits, differences: U16) -> U16:
    """The inverse of `difference`: the new bits. Wraps around; every result is a bit pattern."""
    out = order(old)
    out += differences
    return unorder(out)


@dataclass(frozen=True, slots=True)
class DifferenceStreams:
    """The streams of one list of differences; `escapes` (uint16) goes out as byte planes."""

    signs: bytes
    codes: bytes
    escapes: U16


def encode_differences(differences: U16) -> DifferenceStreams:
    """Split `differences`, of which none is 0."""
    negative = differences >= _SIGN
    flip = (differences.view(np.int16) >> 15).view(
        np.uint16
    )  # all ones where negative, so that ^ and − negate
    magnitude: U16 = differences ^ flip
    magnitude -= flip
    magnitude -= np.uint16(1)
    codes = np.minimum(magnitude, np.uint16(ESCAPE)).astype(np.uint8)
    escapes = magnitude[magnitude >= ESCAPE] - np.uint16(ESCAPE)
    return DifferenceStreams(
        np.packbits(negative, bitorder="little").tobytes(), pack(codes, _CODE_BITS), escapes
    )


def decode_codes(codes: bytes, count: int) -> U8:
    """The `count` codes in their `codes_size` bytes."""
    return unpack(np.frombuffer(codes, np.uint8), count, _CODE_BITS)


def decode_differences(signs: bytes, codes: U8, escapes: U16) -> U16 | None:
    """The differences, none of them 0, or None if an escape is above MAX_ESCAPE.

    `signs` has `signs_size(len(codes))` bytes, `escapes` one entry per ESCAPE among `codes`.
    """
    out = codes.astype(np.uint16)
    if len(escapes):
        if int(escapes.max()) > MAX_ESCAPE:
            return None
        out[codes == ESCAPE] += escapes
    out += np.uint16(1)
    negative = np.unpackbits(np.frombuffer(signs, np.uint8), count=len(codes), bitorder="little")
    flip = np.uint16(0) - negative
    out ^= flip
    out -= flip
    return out


def signs_size(count: int) -> int:
    """Bytes of `signs` for `count` differences."""
    return packed_size(count, 1)


def codes_size(count: int) -> int:
    """Bytes of `codes` for `count` differences."""
    return packed_size(count, _CODE_BITS)
