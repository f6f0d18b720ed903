"""Fold the sections that several versions hold of one window into one update: the last version wins."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chunkstore.codec import WINDOW, Section
from chunkstore.dtypes import Bits, bits_dtype
from manifest.catalog import TensorSpec


@dataclass(frozen=True, slots=True)
class Update:
    """New bits of one window of tensor id `tensor`: flat indices `start` ≤ i < `stop`, the window clipped to
    the tensor.

    `offsets`: uint32, strictly increasing, relative to `start`; None if every element of the range is given.
    `values`: bit patterns as `bits_dtype` of the tensor's dtype, one per element given.
    """

    tensor: int
    start: int
    stop: int
    offsets: npt.NDArray[np.uint32] | None
    values: Bits


def merge(spec: TensorSpec, tensor: int, window: int, sections: Iterable[Section]) -> Update:
    """The update that equals applying `sections`, in version order, one after the other.

    All sections are of tensor id `tensor` and lie inside window number `window`. Memory: a bitmap and a copy
    of one window, whatever the number of sections; they are consumed one at a time.
    """
    start, stop = window * WINDOW, min((window + 1) * WINDOW, spec.numel)
    values = np.zeros(stop - start, bits_dtype(spec.dtype))
    given = np.zeros(stop - start, np.bool_)
    for section in sections:
        assert (section.tensor, section.dtype) == (tensor, spec.dtype), "section of another tensor"
        assert start <= section.start < section.stop <= stop, "section of another window"
        lo, hi = section.start - start, section.stop - start
        if section.offsets is None:
            values[lo:hi] = section.values
            given[lo:hi] = True
        else:
            at = section.offsets + np.uint32(lo)
            values[at] = section.values
            given[at] = True
    if given.all():
        return Update(tensor, start, stop, None, values)
    offsets = np.flatnonzero(given).astype(np.uint32)
    return Update(tensor, start, stop, offsets, values[offsets])
