"""From a shard's own numbering to flat indices of its tensor: sections as they go out."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from chunkstore.codec import WINDOW, Section
from chunkstore.regions import Region, indices_at, runs_at
from publisher.changes import Offsets
from publisher.shard import Shard


def placed(shard: Shard, section: Section) -> Iterator[Section]:
    """`section`, whose range and offsets are the shard's numbers, in the tensor's own flat indices.

    As it is, unless the shard is a box: then cut where windows of the tensor end. What is whole in the box is not so in
    the tensor, where others have elements in between: it goes out element by element, and by its runs if its dtype is
    only sent whole. Without old values, so that as many elements as a box has are never differences.
    """
    if shard.box is None:
        yield section
    elif section.offsets is None and not shard.spec.sparse:
        yield from _runs(section, shard.box)
    else:
        yield from _elements(section, shard.box)


def _elements(section: Section, box: Region) -> Iterator[Section]:
    indices: Offsets
    if section.offsets is None:
        runs = runs_at(box, section.start, section.stop)
        indices = np.concatenate([np.add.outer(firsts, np.arange(length)).ravel() for firsts, length in runs])
    else:
        indices = indices_at(box, section.start + section.offsets.astype(np.int64))
    windows = np.arange(indices[0] // WINDOW, indices[-1] // WINDOW + 2) * WINDOW
    for low, high in pairwise(np.searchsorted(indices, windows).tolist()):
        if low < high:
            start, part = int(indices[low]), slice(low, high)
            yield Section(
                section.tensor,
                section.dtype,
                start,
                int(indices[high - 1]) + 1,
                (indices[part] - start).astype(np.uint32),
                section.values[part],
                old=None if section.old is None else section.old[part],
            )


def _runs(section: Section, box: Region) -> Iterator[Section]:
    done = 0
    for firsts, length in runs_at(box, section.start, section.stop):
        for first in firsts.tolist():
            edge = first + -first % WINDOW
            for low, high in pairwise(sorted({first, min(max(edge, first), first + length), first + length})):
                values = section.values[done : done + high - low]
                yield Section(section.tensor, section.dtype, low, high, None, values)
                done += high - low
