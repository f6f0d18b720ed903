"""torch's ZeroRedundancyOptimizer: every rank has the whole model, and steps some of its parameters for all."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from publisher.adapters.base import Piece
from publisher.adapters.plain import PlainAdapter
from publisher.errors import OptimizerRefused
from publisher.group import Writer


class ZeroRedundancyAdapter(PlainAdapter):
    """Each parameter is published by the rank that steps it, what nothing steps by the first rank.

    Steps are followed in the inner optimizer: the outer one has no moments, and other ranks' parameters come later.
    """

    kind = "ZeroRedundancyOptimizer"
    sharable = False

    def __init__(self, model: nn.Module, optimizer: ZeroRedundancyOptimizer, writer: Writer) -> None:
        if optimizer._overlap_with_ddp:
            raise OptimizerRefused(
                "ZeroRedundancyOptimizer with overlap_with_ddp steps during the backward pass and runs no hook",
                hint="leave overlap_with_ddp out, or set `detect: snapshot` and attach as for DDP",
            )
        super().__init__(model, [optimizer.optim], (), writer)
        self.kind = ZeroRedundancyAdapter.kind
        self.ranks = writer.world_size
        self._outer = optimizer
        self._rank = writer.rank

    def pieces_of(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """See `PlainAdapter`."""
        stepping = self.stepping(tensor)
        if stepping["key"] is not None:
            yield Piece(name, tensor, **stepping)
        elif not any(tensor is p for group in self._outer.param_groups for p in group["params"]):
            yield Piece(name, tensor)

    def replicas(self, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
        """See `Adapter`."""
        return [self.everyone if piece.key is None else (self._rank,) for piece in pieces]
