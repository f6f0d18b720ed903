"""Fold the sections that several versions hold of one window into one update: the last version wins."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from chunkstore import difference
from chunkstore.codec import WINDOW, Section
from chunkstore.dtypes import Bits, bits_dtype
from manifest.catalog import TensorSpec

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Update:
    """New bits of one window of tensor id `tensor`: flat indices `start` ≤ i < `stop`, the window clipped to
    the tensor.

    `offsets`: uint32, strictly increasing, relative to `start`; None if every element of the range is given.
    `values`: bit patterns as `bits_dtype` of the tensor's dtype, one per element given.
    `relative`: bool, one per element given: where True the value is still a difference to the base's bits
    (`chunkstore.difference`); None if no value is.
    """

    tensor: int
    start: int
    stop: int
    offsets: npt.NDArray[np.uint32] | None
    values: Bits
    relative: Flags | None = None


def merge(spec: TensorSpec, tensor: int, window: int, sections: Iterable[Section]) -> Update:
    """The update that equals applying `sections`, in version order, one after the other.

    All sections are of tensor id `tensor` and lie inside window number `window`. Memory: two bitmaps and a copy
    of one window, whatever the number of sections, of which three are held at a time; a single one needs only itself.
    """
    start, stop = window * WINDOW, min((window + 1) * WINDOW, spec.numel)
    rest = iter(sections)
    head = list(islice(rest, 2))
    if len(head) == 1 and (head[0].offsets is not None or stop - start == len(head[0].values)):
        _check_place(head[0], spec, tensor, start, stop)
        return _alone(head[0], start, stop)
    values = np.zeros(stop - start, bits_dtype(spec.dtype))
    given, relative = np.zeros(stop - start, np.bool_), np.zeros(stop - start, np.bool_)
    for section in chain(head, rest):
        _check_place(section, spec, tensor, start, stop)
        lo, hi = section.start - start, section.stop - start
        at = slice(lo, hi) if section.offsets is None else section.offsets + np.uint32(lo)
        if section.relative:
            known = given[at] & ~relative[at]
            before = values[at]  # bits where known, else the sum of the differences so far
            values[at] = np.where(known, difference.add(before, section.values), before + section.values)
            relative[at] = ~known
        else:
            values[at] = section.values
            relative[at] = False
        given[at] = True
    if given.all():
        return Update(tensor, start, stop, None, values, relative if relative.any() else None)
    offsets = np.flatnonzero(given).astype(np.uint32)
    left = relative[offsets]
    return Update(tensor, start, stop, offsets, values[offsets], left if left.any() else None)


def _check_place(section: Section, spec: TensorSpec, tensor: int, start: int, stop: int) -> None:
    assert (section.tensor, section.dtype) == (tensor, spec.dtype), "section of another tensor"
    assert start <= section.start < section.stop <= stop, "section of another window"


def _alone(section: Section, start: int, stop: int) -> Update:
    """The update of one section, which is sparse or gives the whole range."""
    relative = np.ones(len(section.values), np.bool_) if section.relative else None
    offsets = section.offsets
    if offsets is None or len(offsets) == stop - start:
        return Update(section.tensor, start, stop, None, section.values, relative)
    return Update(
        section.tensor, start, stop, offsets + np.uint32(section.start - start), section.values, relative
    )


def resolve(update: Update, base: Bits) -> Update:
    """The same update with every difference resolved. `base`: the base's bits of the elements given, in their order."""
    if update.relative is None:
        return update
    values = np.where(update.relative, difference.add(base, update.values), update.values)
    return replace(update, values=values, relative=None)
