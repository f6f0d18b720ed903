"""Sections: runs of one tensor's elements, whole or only the changed ones. Pure values and their limits."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from chunkstore.dtypes import SPARSE, WIDTH, Bits, bits_dtype

WINDOW_BITS: Final = 22
WINDOW: Final = 1 << WINDOW_BITS
"""Elements of one window. No section crosses a multiple of it, so a (tensor, window) is a bounded unit."""


class Encoding(StrEnum):
    """How a section is stored. Readers refuse what they do not know."""

    DENSE = "dense"  # every element of the range, as byte planes
    ABSOLUTE = "absolute"  # changed elements: Rice-split index gaps, and values as byte planes
    DELTA = "delta"  # the same indices, and differences to the old values, which the receiver has


@dataclass(frozen=True, slots=True)
class Section:
    """Elements of tensor id `tensor` at flat indices `start` ≤ i < `stop`, inside one window; never none.

    `offsets`: uint32, strictly increasing, relative to `start`; None if every element of the range is stored.
    `values`: bit patterns as `bits_dtype(dtype)`, one per offset, or `stop - start` of them. If `relative`, uint16
    differences to the base's bits instead (`chunkstore.difference`), none of them 0; only with offsets.
    `old`: the base's bits, one per value and different from it, where the writer is certain of all of them: then the
    section may be stored as differences. A section that was read has none.
    """

    tensor: int
    dtype: str
    start: int
    stop: int
    offsets: npt.NDArray[np.uint32] | None
    values: Bits
    relative: bool = False
    old: Bits | None = None

    @property
    def whole(self) -> bool:
        """True if every element of the range is stored."""
        return self.offsets is None

    def check(self) -> None:
        """Raise ValueError if a rule above is broken: a bug in the caller, caught before it is stored."""
        problem = range_problem(self.start, self.stop)
        if not problem and self.dtype not in WIDTH:
            problem = f"unknown dtype {self.dtype!r}"
        if not problem and self.values.dtype != bits_dtype(self.dtype):
            problem = f"values are {self.values.dtype}, not {bits_dtype(self.dtype)}"
        if not problem and self.values.ndim != 1:
            problem = f"values have {self.values.ndim} dimensions"
        if not problem and self.offsets is None and len(self.values) != self.stop - self.start:
            problem = f"{len(self.values)} values for the whole range"
        if not problem and self.offsets is not None:
            problem = self._offsets_problem(self.offsets)
        if not problem and (self.relative or self.old is not None):
            problem = self._difference_problem()
        if problem:
            raise ValueError(f"section of tensor {self.tensor}, elements {self.start}…{self.stop}: {problem}")

    def _offsets_problem(self, offsets: npt.NDArray[np.uint32]) -> str:
        if self.dtype not in SPARSE:
            return f"{self.dtype} is stored whole only"
        if offsets.dtype != np.uint32 or offsets.shape != self.values.shape or not len(offsets):
            return f"offsets are {offsets.dtype}{offsets.shape} for values of shape {self.values.shape}"
        if int(offsets[-1]) >= self.stop - self.start or not (offsets[1:] > offsets[:-1]).all():
            return "offsets are not strictly increasing inside the range"
        return ""

    def _difference_problem(self) -> str:
        if self.offsets is None:
            return "whole sections have no differences"
        if self.old is None:
            return "" if self.values.all() else "a difference is 0"
        if self.relative:
            return "differences have no old values"
        if self.old.dtype != self.values.dtype or self.old.shape != self.values.shape:
            return f"old values are {self.old.dtype}{self.old.shape}, the new ones {self.values.shape}"
        return "" if (self.old != self.values).all() else "a value equals its old one"


def range_problem(start: int, stop: int) -> str:
    """What is wrong with a section's range, or the empty string."""
    if not 0 <= start < stop:
        return "the range is empty or negative"
    if start >> WINDOW_BITS != (stop - 1) >> WINDOW_BITS:
        return f"the range crosses a multiple of {WINDOW}"
    return ""
