"""torch's ZeroRedundancyOptimizer: every rank has the whole model, and steps some of its parameters for all."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from manifest.catalog import Catalog
from publisher.adapters.base import Piece, Selection
from publisher.adapters.plain import PlainAdapter
from publisher.adapters.ranks import Ranks
from publisher.errors import OptimizerRefused


class ZeroRedundancyAdapter(PlainAdapter):
    """Each parameter is published by the rank that steps it, what nothing steps by the first rank.

    Steps are followed in the inner optimizer: the outer one has no moments, and other ranks' parameters come later.
    """

    kind = "ZeroRedundancyOptimizer"
    sharable = False

    def __init__(
        self, model: nn.Module, optimizer: ZeroRedundancyOptimizer, ranks: Ranks, selection: Selection
    ) -> None:
        if optimizer._overlap_with_ddp:
            raise OptimizerRefused(
                "ZeroRedundancyOptimizer with overlap_with_ddp steps during the backward pass and runs no hook",
                hint="leave overlap_with_ddp out, or set `detect: snapshot` and attach as for DDP",
            )
        super().__init__(model, [optimizer.optim], (), ranks, selection=selection)
        self.kind = ZeroRedundancyAdapter.kind + selection.kind
        self.ranks = ranks.size
        # Those of now: what is added later stays the first rank's, to which every step brings it.
        self._shared = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        if not any(id(self.carrier(tensor)) in self._shared for tensor in self.named().values()):
            raise OptimizerRefused(
                "no tensor of the model is in the optimizer: there would never be a change to publish",
                hint="attach the optimizer and the model that belong together",
            )

    def pieces_of(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """See `PlainAdapter`."""
        stepping = self.stepping(tensor)
        others = id(self.carrier(tensor)) in self._shared and not self.idle(tensor)
        if stepping["key"] is not None or not others:
            yield Piece(name, tensor, **stepping)

    def replicas(self, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
        """See `Adapter`."""
        own = (self._ranks.rank,)
        return [self.everyone if piece.key is None else own for piece in pieces]

    def problems(self, catalog: Catalog) -> list[str]:
        """See `Adapter`."""
        return self._ranks.strange(catalog)
