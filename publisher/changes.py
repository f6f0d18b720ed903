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
    """What differs from the base, for any number of steps.

    `base`: uint64 digest of each block of the base (meaningless where `whole`). `whole`: bool per block.
    `offsets`: strictly increasing flat indices outside whole blocks; `old`: their bits in the base.
    """

    base: Digests
    whole: Flags
    offsets: Offsets
    old: Bits16

    @classmethod
    def empty(cls, base: Digests) -> Self:
        return cls(base.copy(), np.zeros(len(base), np.bool_), np.empty(0, np.int64), np.empty(0, np.uint16))

    def add(self, offsets: Offsets, old: Bits16) -> None:
        """Merge later changes, `offsets` strictly increasing: an element already known keeps its first old bits."""
        if len(self.offsets):
            # np.unique reports the first occurrence, and the earlier changes come first.
            offsets, first = np.unique(np.concatenate([self.offsets, offsets]), return_index=True)
            old = np.concatenate([self.old, old])[first]
        self.offsets, self.old = offsets, old
        self._promote_dense_blocks()

    def add_whole(self, blocks: Offsets) -> None:
        """These blocks can no longer be told apart element by element: send them whole."""
        self.whole[blocks] = True
        self._drop_inside_whole()

    def before(self, later: Self) -> Self:
        """This set followed by `later`, against this set's base: what a failed commit is merged back as."""
        merged = type(self)(self.base, self.whole | later.whole, self.offsets, self.old)
        merged.add(later.offsets, later.old)
        return merged

    def _promote_dense_blocks(self) -> None:
        counts = np.bincount(self.offsets // BLOCK, minlength=len(self.whole))
        self.whole |= counts > _WHOLE_ABOVE
        self._drop_inside_whole()

    def _drop_inside_whole(self) -> None:
        keep = ~self.whole[self.offsets // BLOCK]
        if not keep.all():
            self.offsets, self.old = self.offsets[keep], self.old[keep]
