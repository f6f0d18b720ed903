"""What of the model one of several writers publishes: what it alone holds, and its share of what others hold alike."""

from collections.abc import Sequence
from itertools import pairwise

from manifest.catalog import Catalog
from publisher.adapters.base import Piece
from publisher.errors import MappingMismatch


def share(
    catalog: Catalog, pieces: Sequence[Piece], replicas: Sequence[tuple[int, ...]], rank: int
) -> list[Piece]:
    """What writer `rank` publishes of its `pieces`, in catalog order: each piece is published by one of its holders.

    `replicas`: the ranks that hold each. They are dealt out by size; what nothing steps belongs to the first of them.
    Ranks that hold the same deal the same way, for each sees all that they share.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    mine = []
    held = zip(pieces, replicas, strict=True)
    for piece, ranks in sorted(
        held, key=lambda h: (-h[0].tensor.numel(), catalog.ids[h[0].name], h[0].start)
    ):
        load = loads.setdefault(ranks, [0] * len(ranks))
        owner = load.index(min(load)) if piece.key is not None else 0
        load[owner] += piece.tensor.numel()
        if ranks[owner] == rank:
            mine.append(piece)
    mine.sort(key=lambda piece: (catalog.ids[piece.name], piece.start))
    _check_apart(mine)
    return mine


def _check_apart(pieces: Sequence[Piece]) -> None:
    """Within one process, what lies between the elements of a piece is others', or a chunk's ranges would overlap."""
    problems = [
        f"{a.name}: elements {a.region.start}…{a.region.last + 1} and {b.region.start}…{b.region.last + 1}"
        for a, b in pairwise(pieces)
        if a.name == b.name and a.tensor.numel() and b.tensor.numel() and b.region.start <= a.region.last
    ]
    if problems:
        raise MappingMismatch(
            "two shards of this process interleave or overlap: " + "; ".join(problems[:10]),
            hint="name them as one shard, or as more shards that end before the next begins",
        )


def whole(catalog: Catalog, pieces: Sequence[Piece]) -> bool:
    """Whether these are all the tensors of the model, each in one piece."""
    return [p.name for p in pieces if p.tensor.numel()] == [
        t.name for t in catalog.tensors if t.numel
    ] and all(p.tensor.numel() == catalog.tensors[catalog.ids[p.name]].numel for p in pieces)
