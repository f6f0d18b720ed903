"""One published tensor as the trainer holds it, and what is known of its changes since the committed version."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch

from chunkstore.regions import Region
from chunkstore.torch_dtypes import BIT_DTYPES, TORCH_DTYPES
from manifest.catalog import TensorSpec
from publisher.changes import BLOCK, ChangeSet, Digests, Offsets, block_count
from publisher.fingerprint import Fingerprint

PIECE = 64 * BLOCK
"""Elements handled at a time: temporaries of a few MB each, whatever the size of the tensor."""


class Source(StrEnum):
    """How a tensor's changes are found (DESIGN §4)."""

    COPY = "copy"  # compare the 16-bit parameter with the master that a step has just written and not yet copied to it
    INVERSION = "inversion"  # undo AdamW from the live optimizer state, then prove it by block digests
    SNAPSHOT = "snapshot"  # compare with a kept copy of the 16-bit values
    DIGEST = "digest"  # compare block digests at publish; blocks that differ are sent whole


@dataclass
class Shard:
    """A live tensor, its place in the catalog, and its change tracking.

    `tensor` holds the elements of the catalog's tensor from flat index `start` on, all of them or a range. Indices and
    block numbers are the catalog tensor's own everywhere; a range that begins inside a block has a short first one.
    Or it holds a `box` of them that is no range, such as some columns of a matrix: then elements are numbered in
    the box's order, from 0, and blocks are blocks of these numbers. Digests are the catalog tensor's in any case.

    `kept`: digest of each block after the last step seen. `changes`: since the base. `step`: the parameter's step
    count when last seen. `snapshot`: flat int16 bits of the last capture, for Source.SNAPSHOT alone. `made`: computes
    what is published where no live tensor holds it, for Source.SNAPSHOT alone; `tensor` is then the snapshot, whatever
    was given for it.
    """

    id: int
    spec: TensorSpec
    tensor: torch.Tensor
    source: Source
    start: int = 0
    kept: Digests = field(init=False)
    changes: ChangeSet = field(init=False)
    snapshot: torch.Tensor | None = field(init=False, default=None)
    step: int = 0
    box: Region | None = None
    made: Callable[[], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if self.made is not None:
            self.tensor = self.made().to(self.wire).contiguous()
            self.snapshot = self.bits(self.tensor).view(-1)
        self.kept = self.digests()
        self.changes = ChangeSet.empty()
        if self.source is Source.SNAPSHOT and self.snapshot is None:
            self.snapshot = torch.empty(self.numel, dtype=torch.int16, device=self.tensor.device)
            for at, bits in self.pieces():
                self.part_of(self.snapshot, at, at + len(bits)).copy_(bits)

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def first_block(self) -> int:
        return self.start // BLOCK

    @property
    def all_blocks(self) -> Offsets:
        return np.arange(self.first_block, self.first_block + len(self.kept))

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.spec.name, self.box)

    @property
    def region(self) -> Region:
        """Which elements of the catalog's tensor these are; there are some."""
        return Region.of(self.start, [self.numel], [1]) if self.box is None else self.box

    @property
    def wire(self) -> torch.dtype:
        return TORCH_DTYPES[self.spec.dtype]

    @property
    def kept_digest(self) -> int:
        """The tensor's digest after the last step seen."""
        return int(self.kept.sum(dtype=np.uint64))

    @property
    def base_digest(self) -> int:
        """The tensor's digest in the base."""
        changes = self.changes
        grown = (self.kept_of(changes.blocks) - changes.base).sum(dtype=np.uint64)
        return (self.kept_digest - int(grown)) % (1 << 64)

    def kept_of(self, blocks: Offsets) -> Digests:
        """The kept digests of `blocks`."""
        digests: Digests = self.kept[blocks - self.first_block]
        return digests

    def kept_from(self, first: int, count: int) -> Digests:
        """The kept digests of `count` blocks from `first` on."""
        return self.kept[first - self.first_block :][:count]

    def moved(self, first: int, digests: Digests) -> Offsets:
        """Blocks of a run from `first` on whose digest is no longer the kept one, now that it is `digests`."""
        moved: Offsets = np.flatnonzero(digests != self.kept_from(first, len(digests))) + first
        return moved

    def move(self, blocks: Offsets, digests: Digests) -> None:
        """`blocks`, strictly increasing, have these digests after the step."""
        self.changes.note(blocks, self.kept_of(blocks))
        self.kept[blocks - self.first_block] = digests

    def send_whole(self) -> None:
        """Every block is to be sent."""
        self.changes.add_whole(self.all_blocks, self.kept)

    def bits(self, values: torch.Tensor) -> torch.Tensor:
        """The inference bits of a `part` of the live tensor, as signed integers of the wire's width."""
        return values.to(self.wire).contiguous().view(BIT_DTYPES[self.spec.width])

    def cuts(self) -> Iterator[tuple[int, int]]:
        """Consecutive ranges, start and stop, of at most PIECE elements; a short first block is one by itself."""
        at = self.start
        while at < self.stop:
            stop = min(at + (-at % BLOCK or PIECE), self.stop)
            yield at, stop
            at = stop

    def follow(self, tensor: torch.Tensor, made: Callable[[], torch.Tensor] | None) -> None:
        """From now on, this is where the elements are, or how they are made."""
        if made is None:
            self.tensor = tensor
        self.made = made

    def pieces(self, tensor: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """(first flat index, inference bits) of the same ranges, of the live tensor or another."""
        for at, stop in self.cuts():
            yield at, self.bits(self.part_of(self.tensor if tensor is None else tensor, at, stop))

    def part_of(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Elements `start` … `stop` of the live tensor, or of another that lies as it does: a master, a moment."""
        return part(tensor, start - self.start, stop - self.start)

    def forget(self) -> None:
        """Changes since the base are not known: what differs by digest goes whole, what does not has not changed."""
        self.kept[self.changes.blocks - self.first_block] = self.changes.base
        self.changes = ChangeSet.empty()

    def digests(self) -> Digests:
        """Block digests of the current bits: one read of the tensor."""
        parts = [self.fingerprint.blocks(bits, start) for start, bits in self.pieces()]
        joined = np.concatenate(parts) if parts else np.empty(0, np.uint64)
        assert len(joined) == (block_count(self.stop) - self.first_block if self.numel else 0)
        return joined


def part(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements `start` … `stop` in row-major order: a view of a contiguous tensor, gathered from any other.

    Never a copy of the whole tensor, as flattening a transposed one would be.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    return tensor[torch.unravel_index(torch.arange(start, stop, device=tensor.device), tensor.shape)]
