"""What attaching would find, as a table for people; nothing is published, and nothing of the trainer is changed."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from chunkstore.open import StoreConfig
from chunkstore.regions import Region
from manifest.catalog import Catalog
from manifest.tiling import tiling_problems
from publisher.adapters.plain import Masters
from publisher.config import PublisherConfig
from publisher.given import read_given
from publisher.group import Writer
from publisher.watch import WatchPlan

_SHOWN = 20
"""Problems that are named."""


@dataclass(frozen=True)
class Found:
    """Some elements of a tensor that this process would publish. `source`: how its changes are found, or why not."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    elements: int
    where: str


@dataclass(frozen=True)
class Explanation:
    """What `Publisher.attach` would find. `str` of it is a table.

    `kind`: what was recognised. `rank` of `ranks` writers. `problems`: why attach would refuse it, of all ranks; empty:
    it would not.
    """

    kind: str
    rank: int
    ranks: int
    elements: int
    tensors: int
    found: tuple[Found, ...]
    problems: tuple[str, ...]

    @property
    def sources(self) -> dict[str, int]:
        """Elements that this process would publish, by source."""
        counts: Counter[str] = Counter()
        for one in self.found:
            counts[one.source] += one.elements
        return dict(counts)

    def __str__(self) -> str:
        here = sum(self.sources.values())
        head = [
            f"{self.kind}; writer {self.rank} of {self.ranks}: {here:,} of {self.elements:,} elements "
            f"in {len(self.found)} shards of {self.tensors} tensors",
            "  " + ", ".join(f"{source} {count:,}" for source, count in sorted(self.sources.items())),
        ]
        columns = [("tensor", "dtype", "shape", "elements here", "which", "source")]
        columns += [
            (f.name, f.dtype, "×".join(map(str, f.shape)) or "scalar", f"{f.elements:,}", f.where, f.source)
            for f in self.found
        ]
        widths = [max(len(row[i]) for row in columns) for i in range(len(columns[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in columns]
        tail = [f"refused: {problem}" for problem in self.problems] or ["every element has one owner"]
        return "\n".join([*head, "", *lines, "", *tail])


def explain(
    optimizer: Any,
    model: nn.Module | Sequence[nn.Module],
    config: PublisherConfig | Mapping[str, Any] | Path | str | None = None,
    *,
    masters: Masters = (),
    writer: Writer | None = None,
) -> Explanation:
    """What `Publisher.attach` with the same arguments would find. Without `config`: everything in bf16.

    Where the model is spread over ranks, all of them call it, and learn of each other's problems.
    Raises what attach raises if it cannot even begin: MappingMismatch, OptimizerRefused, ConfigError.
    """
    given = read_given(optimizer, model, _BF16 if config is None else config, masters, writer)
    ranks, plan = given.ranks, given.plan
    problems = given.adapter.problems(plan.catalog)
    regions = [(plan.catalog.ids[p.name], p.region) for p in plan.pieces if p.tensor.numel()]
    refused = [f"{plan.pieces[number].name} {reason}" for number, reason in plan.refusals.items()]
    told = ranks.told((ranks.rank, regions, refused))
    problems += [f"rank {number}: {problem}" for number, _, own in told for problem in own]
    if len(told) == ranks.size:  # else the others cannot be asked
        problems += _coverage(plan.catalog, [regions for _, regions, _ in told])
    return Explanation(
        given.adapter.kind,
        ranks.rank,
        ranks.size,
        sum(spec.numel for spec in plan.catalog.tensors),
        len(plan.catalog.tensors),
        tuple(_found(plan)),
        tuple(problems[:_SHOWN]),
    )


_BF16 = PublisherConfig(store=StoreConfig(url="memory://nothing-is-published"), inference_dtype="bfloat16")


def _found(plan: WatchPlan) -> list[Found]:
    out = []
    for number, (piece, source) in enumerate(zip(plan.pieces, plan.sources, strict=True)):
        spec = plan.catalog.tensors[plan.catalog.ids[piece.name]]
        how = f"refused: {plan.refusals[number]}" if number in plan.refusals else str(source)
        count = piece.tensor.numel()
        where = "all" if count == spec.numel else _shown(piece.region)
        out.append(Found(spec.name, spec.dtype, spec.shape, how, count, where))
    return out


def _shown(region: Region) -> str:
    if region.stride in ((), (1,)):
        return f"{region.start}…{region.last + 1}"
    boxes = "×".join(f"{n} every {s}" for n, s in zip(region.size, region.stride, strict=True) if s > 1)
    return f"from {region.start}: {boxes}" + (f", {region.size[-1]} each" if region.stride[-1] == 1 else "")


def _coverage(catalog: Catalog, ranks: Sequence[Sequence[tuple[int, Region]]]) -> list[str]:
    regions: dict[int, list[Region]] = defaultdict(list)
    owners: dict[int, list[str]] = defaultdict(list)
    for rank, held in enumerate(ranks):
        for tensor, region in held:
            regions[tensor].append(region)
            owners[tensor].append(f"writer {rank}")
    return [
        f"{spec.name}: {problem}"
        for tensor, spec in enumerate(catalog.tensors)
        for problem in tiling_problems(spec.numel, regions[tensor], owners[tensor])
    ]
