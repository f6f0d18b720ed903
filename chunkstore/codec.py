"""Sections: runs of one tensor's elements, whole or only the changed ones, and their encoded forms."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from chunkstore.dtypes import Bits

WINDOW: Final = 1 << 22
"""Elements of one window. No section crosses a multiple of it, so a (tensor, window) is a bounded unit."""


class Encoding(StrEnum):
    """How a section is stored. Readers refuse what they do not know."""

    DENSE = "dense"  # every element of the range, as byte planes
    ABSOLUTE = "absolute"  # changed elements: Rice-split index gaps, and values as byte planes


@dataclass(frozen=True, slots=True)
class Section:
    """Elements of tensor id `tensor` at flat indices `start` ≤ i < `stop`, inside one window.

    `offsets`: uint32, strictly increasing, relative to `start`; None if every element of the range is stored.
    `values`: bit patterns as `bits_dtype(dtype)`, one per offset, or `stop - start` of them.
    """

    tensor: int
    dtype: str
    start: int
    stop: int
    offsets: npt.NDArray[np.uint32] | None
    values: Bits

    @property
    def whole(self) -> bool:
        """True if every element of the range is stored."""
        return self.offsets is None
