"""Decide what is watched and how: shards of catalog tensors, each with its source of changes."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.optim import Optimizer

from manifest.catalog import Catalog
from manifest.checkpoint import Checkpoint
from publisher.adapters.base import Adapter, Piece
from publisher.config import PublisherConfig
from publisher.errors import MappingMismatch, OptimizerRefused
from publisher.group import Writer
from publisher.mapping import check_still_fits, map_model
from publisher.optimizers import NOT_INVERTIBLE, StepRecord
from publisher.ownership import share
from publisher.shard import Shard, Source

_WIRE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class WatchPlan:
    """What to watch and how: what this process publishes, in catalog order, from which source, and the steps taken.

    `refusals`: why a piece cannot be followed as configured, by its number. `stepped`: whether an optimizer steps
    anything of what this process holds, be it another's to publish.
    """

    catalog: Catalog
    pieces: tuple[Piece, ...]
    sources: tuple[Source, ...]
    steps: tuple[int, ...]
    refusals: dict[int, str] = field(default_factory=dict)
    stepped: bool = True

    @property
    def inverted(self) -> dict[int, int]:
        """Catalog ids of the parameters found by inversion, by the `id()` of the live one."""
        rows = zip(self.pieces, self.sources, strict=True)
        return {
            piece.key: self.catalog.ids[piece.name]
            for piece, source in rows
            if source is Source.INVERSION and piece.key is not None
        }

    def check(self, adapter: Adapter) -> None:
        """Raises OptimizerRefused naming the parameter and the reason, MappingMismatch."""
        problems = adapter.problems(self.catalog)
        if problems:
            raise MappingMismatch(
                "the ranks' shards do not fit together: " + "; ".join(problems[:30]),
                hint="a copy that differs has drifted from the others, as what neither fully_shard nor DDP wraps does: "
                "there each rank has gradients of its own; any other problem is a layout that deltasync does not "
                "understand: please report it with the tensors' placements",
            )
        adapter.together(lambda: self._check_followed(adapter))

    def _check_followed(self, adapter: Adapter) -> None:
        for number, reason in self.refusals.items():
            raise OptimizerRefused(
                f"parameter {self.pieces[number].name} {reason}: its steps cannot be inverted",
                hint=NOT_INVERTIBLE,
            )
        if adapter.ranks == 1 and not self.stepped:
            raise OptimizerRefused(
                "no tensor of the model is in the optimizer: there would never be a change to publish",
                hint="attach the optimizer and the model that belong together",
            )

    def describe(self, kind: str, writer: Writer | None) -> str:
        """What was found, in one line."""
        sources: Counter[str] = Counter()
        for piece, source in zip(self.pieces, self.sources, strict=True):
            sources[source] += piece.tensor.numel()
        listed = ", ".join(f"{source} {count:,}" for source, count in sources.most_common())
        place = "one process" if writer is None else f"writer {writer.rank} of {writer.world_size}"
        return (
            f"{kind}; {place} with {len(self.pieces)} shards, {sources.total():,} of "
            f"{sum(t.numel for t in self.catalog.tensors):,} elements of {len(self.catalog.tensors)} tensors ({listed})"
        )


class Watched:
    """The shards in catalog order, and which of them an optimizer's step is about."""

    def __init__(self, adapter: Adapter, plan: WatchPlan) -> None:
        self.adapter = adapter
        self.catalog = plan.catalog
        self.shards = make_shards(plan)
        self._follow(plan.pieces)

    @property
    def follows_steps(self) -> bool:
        """Whether steps have to be seen as they happen."""
        return bool(self._inverted or self._copied)

    def refresh(self) -> None:
        """Look the tensors up again: a buffer may have been replaced by assignment, a shard have been moved.

        Raises MappingMismatch if names, shapes, dtypes or ties are no longer those of the catalog.
        """
        check_still_fits(self.adapter.named(), self.catalog)
        found = {(piece.name, piece.start): piece for piece in self.adapter.pieces(self.catalog)}
        pieces = [found.get((shard.spec.name, shard.region.start)) for shard in self.shards]
        gone = [
            shard.spec.name
            for shard, piece in zip(self.shards, pieces, strict=True)
            if piece is None or piece.region != shard.region
        ]
        if gone:
            raise MappingMismatch(
                f"this process no longer holds the shards that it had at attach: {', '.join(gone[:10])}",
                hint="a publisher follows one layout; attach a new one after resharding",
            )
        self._follow([piece for piece in pieces if piece is not None])

    def records(self, optimizer: Optimizer) -> Iterator[tuple[Shard, StepRecord]]:
        """What the step that `optimizer` has just taken did to shards found by inversion."""
        for key, tensor, record in self.adapter.records(optimizer, self._inverted):
            for number in self._by_key[key]:
                piece, shard = self._pieces[number], self.shards[number]
                shard.tensor = piece.part_of(tensor)
                yield shard, record.of(piece.part_of)

    def copies(self, optimizer: Optimizer) -> Iterator[tuple[Shard, torch.Tensor]]:
        """The shards whose masters `optimizer` has just stepped, with these. Raises MappingMismatch as `refresh`."""
        if self._copied and self.adapter.moved():  # the old bits are not where they were
            self.refresh()
        for key, tensor in self.adapter.stepped(optimizer):
            if key in self._copied:
                for number in self._by_key[key]:
                    yield self.shards[number], self._pieces[number].part_of(tensor)

    def _follow(self, pieces: Sequence[Piece]) -> None:
        """`pieces`: of the shards, in their order."""
        # Not their masters: a view of one would keep its memory when it is offloaded between steps.
        self._pieces = tuple(replace(piece, master=None) for piece in pieces)
        by_key: dict[int, list[int]] = defaultdict(list)
        keys: dict[Source, set[int]] = defaultdict(set)
        for number, (shard, piece) in enumerate(zip(self.shards, pieces, strict=True)):
            shard.follow(piece.tensor, piece.made)
            if piece.key is not None:
                by_key[piece.key].append(number)
                keys[shard.source].add(piece.key)
        self._by_key, self._inverted, self._copied = dict(by_key), keys[Source.INVERSION], keys[Source.COPY]


def plan_watch(
    adapter: Adapter, checkpoint: Checkpoint | None, config: PublisherConfig, rank: int = 0
) -> WatchPlan:
    """Map the model and choose a source for everything that writer `rank` publishes of it. Raises MappingMismatch."""

    def hold() -> tuple[Catalog, list[Piece]]:
        catalog = map_model(adapter.named(), checkpoint, _WIRE.get(config.inference_dtype or ""))
        return catalog, adapter.pieces(catalog)

    catalog, held = adapter.together(hold)
    replicas = adapter.replicas(held)
    stepped = any(piece.key is not None for piece in held)
    return adapter.together(
        lambda: _plan(adapter, catalog, share(catalog, held, replicas, rank), config, stepped)
    )


def _plan(
    adapter: Adapter, catalog: Catalog, pieces: Sequence[Piece], config: PublisherConfig, stepped: bool
) -> WatchPlan:
    sources, steps, refusals = [], [], {}
    for number, piece in enumerate(pieces):
        source = _source(piece, catalog, config)
        step = 0
        if source is Source.INVERSION:
            refusal, step = adapter.refusal(piece), adapter.steps_taken(piece)
            if refusal is not None:
                refusals[number] = refusal
        sources.append(source)
        steps.append(step)
    return WatchPlan(catalog, tuple(pieces), tuple(sources), tuple(steps), refusals, stepped)


def _source(piece: Piece, catalog: Catalog, config: PublisherConfig) -> Source:
    if piece.made is not None:
        if not catalog.tensors[catalog.ids[piece.name]].sparse:
            raise MappingMismatch(
                f"{piece.name} is computed for rollouts, which only works in 16 bits",
                hint="set `inference_dtype: bfloat16`",
            )
        return Source.SNAPSHOT
    if piece.key is None or not catalog.tensors[catalog.ids[piece.name]].sparse:
        return Source.DIGEST
    if config.detect == "snapshot":
        return Source.SNAPSHOT
    return Source.INVERSION if piece.master is None else Source.COPY


def make_shards(plan: WatchPlan) -> tuple[Shard, ...]:
    """Reads every tensor once, for its digests."""
    shards = []
    for piece, source, step in zip(plan.pieces, plan.sources, plan.steps, strict=True):
        number, region = plan.catalog.ids[piece.name], piece.region
        box = None if region.stride in ((), (1,)) else region
        start = 0 if box else piece.start
        spec = plan.catalog.tensors[number]
        shard = Shard(number, spec, piece.tensor, source, start, box=box, made=piece.made)
        shard.step = step
        shards.append(shard)
    return tuple(shards)
