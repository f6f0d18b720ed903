"""How the elements of a shard count in the digest of their tensor, wherever in it they lie."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from chunkstore.digest import Coefficients
from chunkstore.digest_torch import block_digests, box_block_digests
from chunkstore.regions import Region, indices_at, runs_at
from publisher import kernel
from publisher.changes import BLOCK, Digests, Offsets
from publisher.proof import Terms

_PIECE: Final = 1 << 20
"""Elements whose weights are held at a time: 8 MiB."""
_NONE: Final = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of tensor `name`. Elements are numbered by flat index or, where there is a `box`, by their order in it."""

    name: str
    box: Region | None = None

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients.of(self.name)

    def weights(self, numbers: Offsets) -> Terms:
        """A·C of each of these elements of a 16-bit tensor (docs/FORMAT.md, "Digest"); uint64."""
        coefficients = self.coefficients
        indices = numbers if self.box is None else indices_at(self.box, numbers)
        rows = indices.astype(np.uint64) >> np.uint64(12)
        weights: Terms = coefficients.a(rows) * coefficients.c[indices & 4095]
        return weights

    def run(self, start: int, stop: int) -> Terms:
        """The same of elements `start` … `stop`; empty where flat indices tell a kernel as much."""
        if self.box is None:
            return _NONE
        weights, done = np.empty(stop - start, np.uint64), 0
        for firsts, length in runs_at(self.box, start, stop):
            some = weights[done : done + len(firsts) * length]
            kernel.weigh(firsts, length, np.uint64(self.coefficients.seed_a), self.coefficients.c, some)
            done += len(some)
        return weights

    def blocks(self, bits: torch.Tensor, start: int) -> Digests:
        """Digest of each block of a run of elements, number `start` first; it may begin inside a block."""
        if self.box is None:
            head = -start % BLOCK
            parts = [block_digests(self.coefficients, bits[:head], start, BLOCK)] if head else []
            if head < len(bits):
                parts.append(block_digests(self.coefficients, bits[head:], start + head, BLOCK))
        elif bits.device.type == "cpu" and bits.element_size() == 2:
            return self._box_blocks(bits, start, self.box)
        else:
            parts = [box_block_digests(self.coefficients, bits, self.box, start, BLOCK)]
        joined: Digests = torch.cat(parts).cpu().numpy().view(np.uint64)
        return joined

    def _box_blocks(self, bits: torch.Tensor, start: int, box: Region) -> Digests:
        values, digests = bits.numpy().view(np.uint16), np.empty(-(-len(bits) // BLOCK), np.uint64)
        for low in range(0, len(values), _PIECE):
            some = values[low : low + _PIECE]
            weights = self.run(start + low, start + low + len(some))
            kernel.weighted_digests(some, weights, digests[low // BLOCK :][: -(-len(some) // BLOCK)])
        return digests
