"""Put the writers' parts of one version together, or say why they do not fit. Pure: no I/O, no clock."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chunkstore.regions import Region
from manifest.catalog import Catalog
from manifest.parts import Call, Part
from manifest.schema import ChunkRef, Stats
from manifest.sections import SectionRef
from manifest.tiling import tiling_problems
from publisher.errors import WritersDisagree

U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_SHOWN = 10
"""Problems that a refusal names."""


@dataclass(frozen=True)
class Combined:
    """One version, from all parts. `digests`: per catalog tensor.

    `stale`: tensors that are not sent whole, though what their writers take for the base is not: never to be committed.
    """

    digests: U64
    chunks: list[ChunkRef]
    stats: Stats
    stale: list[int]


def combine(call: Call, catalog: Catalog, parts: Sequence[Part], committed: U64 | None) -> Combined:
    """`parts`: one per writer, in order. `committed`: the base's digests in catalog order, None without a base.

    Raises WritersDisagree if a part is not an answer to `call`, or the parts do not own every element exactly once.
    """
    problems = [*_other_answers(call, parts), *_coverage(catalog, parts), *_strange_sections(parts)]
    if problems:
        more = len(problems) - _SHOWN
        raise WritersDisagree(
            f"the writers of version {call.version} do not fit together: " + "; ".join(problems[:_SHOWN])
            + (f"; and {more} more" if more > 0 else ""),
            hint="every element of every tensor needs exactly one owner, and all writers publish the same step",
        )  # fmt: skip
    base, digests = ([0] * len(catalog.tensors) for _ in range(2))
    for part in parts:
        for shard in part.shards:
            base[shard.tensor] += shard.base
            digests[shard.tensor] += shard.digest
    # Where every element is stored, none is a difference: a section is one only if it stores a third or less.
    stored: Counter[int] = Counter()
    for section in _sections(parts):
        stored[section.tensor] += section.changed
    stale = [
        tensor
        for tensor, spec in enumerate(catalog.tensors)
        if stored[tensor] < spec.numel and (committed is None or base[tensor] & _MASK != committed[tensor])
    ]
    totals = np.array([digest & _MASK for digest in digests], np.uint64)
    return Combined(totals, [c for p in parts for c in p.chunks], _total([p.stats for p in parts]), stale)


def _other_answers(call: Call, parts: Sequence[Part]) -> Iterator[str]:
    for number, part in enumerate(parts):
        if part.writer != number:
            yield f"part {number} is of writer {part.writer}"
        for name in ("stream", "version", "attempt", "base", "train_step", "layout"):
            wanted, found = getattr(call, name), getattr(part, name)
            if found != wanted:
                yield f"writer {number} answers with {name} {_shown(found)}, the call is for {_shown(wanted)}"


def _shown(value: object) -> str:
    return value.hex()[:16] + "…" if isinstance(value, bytes) else str(value)


def _coverage(catalog: Catalog, parts: Sequence[Part]) -> Iterator[str]:
    regions: dict[int, list[Region]] = defaultdict(list)
    owners: dict[int, list[str]] = defaultdict(list)
    for part in parts:
        for shard in part.shards:
            regions[shard.tensor].append(shard.region)
            owners[shard.tensor].append(f"writer {part.writer}")
    for tensor in sorted(regions.keys() - set(range(len(catalog.tensors)))):
        yield f"{owners[tensor][0]} has a part of tensor {tensor}, the catalog has fewer"
    for tensor, spec in enumerate(catalog.tensors):
        for problem in tiling_problems(spec.numel, regions[tensor], owners[tensor]):
            yield f"{spec.name}: {problem}"


def _strange_sections(parts: Sequence[Part]) -> Iterator[str]:
    for part in parts:
        owned: dict[int, list[Region]] = defaultdict(list)
        for shard in part.shards:
            owned[shard.tensor].append(shard.region)
        for section in _sections([part]):
            if not any(
                r.start <= section.start and section.stop <= r.last + 1 for r in owned[section.tensor]
            ):
                where = f"elements {section.start}…{section.stop} of tensor {section.tensor}"
                yield f"writer {part.writer} sends {where}, which it does not own"


def _sections(parts: Sequence[Part]) -> Iterator[SectionRef]:
    return (section for part in parts for chunk in part.chunks for section in chunk.sections)


def _total(all_stats: Sequence[Stats]) -> Stats:
    """Counts add up; of durations the longest counts, for the writers work at the same time."""
    encodings: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for stats in all_stats:
        encodings.update(stats.bytes_by_encoding)
        sources.update(stats.sources)
        seconds |= {phase: max(s, seconds.get(phase, 0.0)) for phase, s in stats.seconds.items()}
    return Stats(
        elements=all_stats[0].elements,
        changed=sum(s.changed for s in all_stats),
        ambiguous=sum(s.ambiguous for s in all_stats),
        unproved_blocks=sum(s.unproved_blocks for s in all_stats),
        bytes_by_encoding=dict(encodings),
        sources=dict(sources),
        seconds=seconds,
    )
