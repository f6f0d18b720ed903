"""Shards that the caller names one by one, for a trainer that no adapter knows."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from manifest.catalog import Catalog
from publisher.adapters.base import Piece, Selection
from publisher.adapters.plain import Masters, PlainAdapter
from publisher.adapters.ranks import Ranks
from publisher.errors import MappingMismatch
from publisher.group import Owned
from publisher.mapping import castable


class GivenAdapter(PlainAdapter):
    """`model` gives names, shapes and dtypes; what is live are the tensors that the writer of `ranks` owns."""

    kind = "named by the caller"
    sharable = False

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        masters: Masters,
        ranks: Ranks,
        selection: Selection,
    ) -> None:
        assert ranks.writer is not None
        assert ranks.writer.owned is not None
        self._owned: Sequence[Owned] = ranks.writer.owned
        super().__init__(model, optimizers, masters, ranks, selection=selection)
        self.kind = GivenAdapter.kind + selection.kind
        self.ranks = ranks.size

    def pieces(self, catalog: Catalog) -> list[Piece]:
        """See `Adapter`. Raises MappingMismatch naming every one that is no place in the model."""
        found, problems = [], []
        for one in self._owned:
            problem = _problem(one, catalog)
            if problem is not None:
                problems.append(problem)
            elif one.tensor.numel():
                name = catalog.aliases.get(one.name, one.name)
                found.append(Piece(name, one.tensor, one.start, one.strides, **self.stepping(one.tensor)))
        if problems:
            raise MappingMismatch(
                "what this writer owns does not fit the model: " + "; ".join(problems[:30]),
                hint="name each shard by its tensor in the checkpoint, its first flat index and its elements",
            )
        return found

    def replicas(self, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
        """See `Adapter`: what the caller names is this rank's to publish."""
        return [(self._ranks.rank,)] * len(pieces)

    def problems(self, catalog: Catalog) -> list[str]:
        """See `Adapter`."""
        return self._ranks.strange(catalog)

    def drifted(self, catalog: Catalog) -> list[str]:
        """See `Adapter`."""
        return []  # what is named belongs to one rank alone

    def _names(self) -> dict[int, str]:
        return {id(one.tensor): one.name for one in self._owned}


def _problem(one: Owned, catalog: Catalog) -> str | None:
    number = catalog.ids.get(catalog.aliases.get(one.name, one.name))
    if number is None:
        return f"{one.name} is not a tensor of the model"
    spec = catalog.tensors[number]
    if not castable(one.tensor.dtype, spec.dtype):
        return f"{one.name} is {one.tensor.dtype} and cannot be sent as {spec.dtype}"
    if one.stride is not None and len(one.stride) != one.tensor.ndim:
        return f"{one.name} has {one.tensor.ndim} dimensions, but {len(one.stride)} strides"
    last = one.start + one.tensor.numel() - 1
    if one.tensor.numel() and one.stride is not None:
        steps = [(n, s) for n, s in zip(one.tensor.shape, one.stride, strict=True) if n > 1]
        region = Piece(one.name, one.tensor, one.start, one.strides).region
        if [s for _, s in steps] != sorted((s for _, s in steps), reverse=True) or not region.nested:
            return f"{one.name} has strides {tuple(one.stride)}, which are not those of a row-major tensor"
        last = region.last
    if one.start < 0 or last >= spec.numel:
        return f"{one.name} has {spec.numel} elements, not {one.start}…{last + 1}"
    return None
