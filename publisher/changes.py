"""The changes of one tensor since its base: sorted offsets with the *first* old bits, and blocks to send whole."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

BLOCK: Final = 1 << 14
"""Elements per proof block (DESIGN: 8 bytes of digest for each)."""

_WHOLE_ABOVE: Final = BLOCK // 3
"""Changed elements of a block above which it is sent whole: sparse would be larger."""

Offsets = npt.NDArray[np.int64]
Bits16 = npt.NDArray[np.uint16]
Flags = npt.NDArray[np.bool_]
Digests = npt.NDArray[np.uint64]


def block_count(numel: int) -> int:
    return -(-numel // BLOCK)


@dataclass
class ChangeSet:
    """What differs from the base, for any number of steps. Nothing in it grows with the tensor, only with the changes.

    `blocks`: the blocks that have changed or go whole, strictly increasing. `base`: uint64 digest of each in the base
    (meaningless where `whole`); any other block's is the one it has now. `whole`: bool for each of them.
    `offsets`: strictly increasing flat indices in `blocks` that are not whole; `old`: their bits in the base.
    """

    blocks: Offsets
    base: Digests
    whole: Flags
    offsets: Offsets
    old: Bits16

    @classmethod
    def empty(cls) -> Self:
        return cls(
            np.empty(0, np.int64),
            np.empty(0, np.uint64),
            np.empty(0, np.bool_),
            np.empty(0, np.int64),
            np.empty(0, np.uint16),
        )

    @property
    def whole_blocks(self) -> Offsets:
        """Numbers of the blocks to send whole."""
        return self.blocks[self.whole]

    def is_whole(self, first: int, count: int) -> Flags:
        """For each of `count` blocks from `first` on, whether it goes whole."""
        flags = np.zeros(count, np.bool_)
        inside = self._inside(first, count)
        flags[self.blocks[inside] - first] = self.whole[inside]
        return flags

    def base_digests(self, first: int, now: Digests) -> Digests:
        """Base digests of a run of blocks from `first` on, whose digests are `now`."""
        digests = now.copy()
        inside = self._inside(first, len(now))
        digests[self.blocks[inside] - first] = self.base[inside]
        return digests

    def note(self, blocks: Offsets, digests: Digests) -> None:
        """Before they change: `blocks`, strictly increasing, have these digests. One that is known keeps its first."""
        if len(blocks):
            self._include(blocks, digests, np.zeros(len(blocks), np.bool_))

    def add(self, offsets: Offsets, old: Bits16) -> None:
        """Merge later changes, `offsets` strictly increasing and in noted blocks: the first old bits are kept."""
        if len(self.offsets):
            # np.unique reports the first occurrence, and the earlier changes come first.
            offsets, first = np.unique(np.concatenate([self.offsets, offsets]), return_index=True)
            old = np.concatenate([self.old, old])[first]
        self.offsets, self.old = offsets, old
        first, last = self._spans(self.blocks)
        self.whole |= last - first > _WHOLE_ABOVE
        self._drop_inside_whole()

    def add_whole(self, blocks: Offsets, digests: Digests) -> None:
        """Note `blocks`, which can no longer be told apart element by element: send them whole."""
        if len(blocks):
            self._include(blocks, digests, np.ones(len(blocks), np.bool_))
            self._drop_inside_whole()

    def before(self, later: Self) -> Self:
        """This set followed by `later`, against this set's base: what a failed commit is merged back as."""
        merged = type(self)(self.blocks, self.base, self.whole.copy(), self.offsets, self.old)
        merged._include(later.blocks, later.base, later.whole)
        merged.add(later.offsets, later.old)
        return merged

    def _inside(self, first: int, count: int) -> slice:
        return slice(*np.searchsorted(self.blocks, [first, first + count]).tolist())

    def _include(self, blocks: Offsets, base: Digests, whole: Flags) -> None:
        joined, first = np.unique(np.concatenate([self.blocks, blocks]), return_index=True)
        known, added = np.searchsorted(joined, self.blocks), np.searchsorted(joined, blocks)
        flags = np.zeros(len(joined), np.bool_)
        flags[known] = self.whole
        flags[added] |= whole
        self.base = np.concatenate([self.base, base])[first]
        self.blocks, self.whole = joined, flags

    def _spans(self, blocks: Offsets) -> tuple[Offsets, Offsets]:
        """Where the offsets of each block begin and end."""
        first, last = np.searchsorted(self.offsets, [blocks * BLOCK, (blocks + 1) * BLOCK])
        return first, last

    def _drop_inside_whole(self) -> None:
        first, last = self._spans(self.whole_blocks)
        filled = first < last
        if filled.any():
            depth = np.zeros(len(self.offsets) + 1, np.int8)
            depth[first[filled]] += 1
            depth[last[filled]] -= 1
            keep = np.cumsum(depth[:-1], dtype=np.int8) == 0
            self.offsets, self.old = self.offsets[keep], self.old[keep]
