"""Where each canonical element lies in the live memory of each rank.

A rank's map is a list of boxes: strided regions of canonical tensors, each with a strided region of one live memory.
Fused projections, replicated heads, sharded rows and columns, experts and padding are all just boxes. numpy only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Final, Self

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chunkstore.dtypes import WIDTH
from chunkstore.regions import Indices, Region, count_below, nested, offsets, overlaps, run_rows
from manifest.catalog import MAX_TENSORS, Catalog
from subscriber.errors import EngineMismatch, name_offenders

MAP_FORMAT: Final = 1
MAX_BOXES: Final = 1 << 22
MAX_MAP_BYTES: Final = 512 << 20

_Count = Annotated[int, Field(ge=0, lt=1 << 48)]
_Counts = Annotated[tuple[_Count, ...], Field(max_length=64)]


@dataclass(frozen=True, slots=True)
class Memory:
    """One distinct storage among a model's parameters and persistent buffers.

    `name`: of the first parameter that lies in it; `dtype`: wire name; `numel`: elements in the whole storage.
    """

    name: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of canonical tensor number `tensor` that lie in memory number `memory`.

    Element k⃗ of `size` has canonical flat index `source` + k⃗·`source_stride`, and lies at element
    `target` + k⃗·`target_stride` of the memory's storage. Normal form, made by `Box.of`: sizes above 1 (so a
    single element has none), descending source strides, neighbours merged where both sides allow it.
    """

    tensor: int
    memory: int
    source: int
    target: int
    size: tuple[int, ...]
    source_stride: tuple[int, ...]
    target_stride: tuple[int, ...]

    @classmethod
    def of(
        cls,
        tensor: int,
        memory: int,
        source: int,
        target: int,
        size: Iterable[int],
        source_stride: Iterable[int],
        target_stride: Iterable[int],
    ) -> Self:
        dims = [d for d in zip(size, source_stride, target_stride, strict=True) if d[0] > 1]
        merged: list[tuple[int, int, int]] = []
        for n, s, t in sorted(dims, key=lambda d: (-d[1], -d[2])):
            if merged and merged[-1][1:] == (n * s, n * t):
                merged[-1] = (merged[-1][0] * n, s, t)
            else:
                merged.append((n, s, t))
        n_, s_, t_ = (tuple(d[i] for d in merged) for i in range(3))
        return cls(tensor, memory, source, target, n_, s_, t_)

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def contiguous(self) -> bool:
        """Consecutive canonical elements lie consecutively in memory."""
        return not self.size or (self.source_stride == (1,) and self.target_stride == (1,))

    @property
    def source_region(self) -> Region:
        return Region.of(self.source, self.size, self.source_stride)

    @property
    def target_region(self) -> Region:
        return Region.of(self.target, self.size, self.target_stride)


def locate(box: Box, indices: Indices) -> tuple[Indices, Indices]:
    """Which of `indices` (int64, canonical flat, ascending) lie in `box`, and where in its memory.

    Returns (positions in `indices`, ascending; elements of the memory's storage), both int64 and equally long.
    """
    last = box.source + sum((n - 1) * s for n, s in zip(box.size, box.source_stride, strict=True))
    first, stop = np.searchsorted(indices, [box.source, last + 1])
    rest = indices[first:stop] - box.source
    positions = np.arange(first, stop, dtype=np.int64)
    if box.contiguous:
        return positions, rest + box.target
    targets = np.full_like(rest, box.target)
    inside = np.ones(len(rest), bool)
    for n, s, t in zip(box.size, box.source_stride, box.target_stride, strict=True):
        digit, rest = np.divmod(rest, s)
        inside &= digit < n
        targets += digit * t
    inside &= rest == 0
    return positions[inside], targets[inside]


def runs(box: Box, start: int, stop: int) -> Iterator[tuple[Indices, Indices, int]]:
    """The part of `box` within the canonical range `start` … `stop`, as runs, in canonical order.

    Yields (sources, targets, length): `length` consecutive canonical elements from each source lie consecutively
    from each target. Few distinct lengths occur: whole rows, and those that the range cuts. At most PIECE runs a time.
    """
    outer, length = len(box.size), 1
    if outer and box.source_stride[-1] == 1 and box.target_stride[-1] == 1:
        outer, length = outer - 1, box.size[-1]
    ends = [count_below(i, box.source, box.size, box.source_stride) for i in (start, stop)]
    size, source_stride, target_stride = (
        box.size[:outer],
        box.source_stride[:outer],
        box.target_stride[:outer],
    )
    for rows, column, part in run_rows(ends[0], ends[1], length):
        sources, targets = offsets(rows, size, source_stride, target_stride)
        yield sources + (box.source + column), targets + (box.target + column), part


class _WireMap(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: int
    catalog: bytes = Field(min_length=32, max_length=32)
    memories: tuple[tuple[str, str, _Count], ...] = Field(max_length=MAX_TENSORS)
    boxes: tuple[tuple[_Count, _Count, _Count, _Count, _Counts, _Counts, _Counts], ...] = Field(
        max_length=MAX_BOXES
    )


@dataclass(frozen=True, slots=True)
class BoxMap:
    """All boxes of one rank, sorted by (tensor, source), and the memories they lie in.

    `catalog`: the hash of the catalog whose tensors are numbered. What a loader fills with zeros is not part of it.
    """

    catalog: bytes
    memories: tuple[Memory, ...]
    boxes: tuple[Box, ...]

    def to_bytes(self) -> bytes:
        """The wire form (msgpack)."""
        boxes = [
            [b.tensor, b.memory, b.source, b.target, b.size, b.source_stride, b.target_stride]
            for b in self.boxes
        ]
        memories = [[m.name, m.dtype, m.numel] for m in self.memories]
        wire = {"format": MAP_FORMAT, "catalog": self.catalog, "memories": memories, "boxes": boxes}
        packed = msgpack.packb(wire)
        assert isinstance(packed, bytes)
        return packed

    @classmethod
    def from_bytes(cls, data: bytes, catalog: Catalog) -> Self:
        """Parse and check the wire form against `catalog`. Raises EngineMismatch naming every offender.

        Afterwards each box is in normal form, lies inside its tensor and its memory, both of one dtype, and no two
        boxes share a live element.
        """
        if len(data) > MAX_MAP_BYTES:
            raise EngineMismatch(
                f"a rank's map has {len(data):,} bytes, more than {MAX_MAP_BYTES:,}", hint=_HINT
            )
        try:
            wire = _WireMap.model_validate(msgpack.unpackb(data, strict_map_key=True, use_list=False))
        except (ValueError, msgpack.exceptions.UnpackException, ValidationError) as error:
            raise EngineMismatch(f"a rank's map cannot be read: {error!s:.1000}", hint=_HINT) from error
        if wire.format != MAP_FORMAT:
            raise EngineMismatch(f"a rank's map has format {wire.format}, not {MAP_FORMAT}", hint=_HINT)
        boxes = tuple(Box(*b) for b in wire.boxes)
        read = cls(wire.catalog, tuple(Memory(*m) for m in wire.memories), boxes)
        read.check(catalog)
        return read

    def check(self, catalog: Catalog) -> None:
        """Raise EngineMismatch, naming every offender, unless the map is what `from_bytes` promises."""
        if self.catalog != catalog.hash:
            raise EngineMismatch(
                f"a rank's map is of catalog {self.catalog.hex()}, the stream has {catalog.hash.hex()}",
                hint="the map is traced again for the stream's catalog",
            )
        problems = [
            f"{m.name!r} has unknown dtype {m.dtype!r}" for m in self.memories if m.dtype not in WIDTH
        ]
        problems += [p for box in self.boxes if (p := self._problem(box, catalog))]
        if not problems:
            problems += self._collisions(catalog)
        keys = [(b.tensor, b.source) for b in self.boxes]
        if keys != sorted(keys):
            problems.append("the boxes are not sorted")
        if problems:
            raise EngineMismatch(
                f"a rank's map does not fit the stream's catalog: {name_offenders(problems)}", hint=_HINT
            )

    def _problem(self, box: Box, catalog: Catalog) -> str | None:
        if box.tensor >= len(catalog.tensors) or box.memory >= len(self.memories):
            return f"a box names tensor {box.tensor} and memory {box.memory}, which do not exist"
        spec, memory = catalog.tensors[box.tensor], self.memories[box.memory]
        if not len(box.size) == len(box.source_stride) == len(box.target_stride):
            return f"a box of {spec.name!r} has {box.size} elements but other strides"
        if spec.dtype != memory.dtype:
            return (
                f"{spec.name!r} is {spec.dtype} in the catalog, but lies in {memory.name!r} of {memory.dtype}"
            )
        target = box.target_region
        if not nested(box.size, box.source_stride) or not target.nested:
            return f"a box of {spec.name!r} in {memory.name!r} holds an element twice"
        normal = Box.of(
            box.tensor, box.memory, box.source, box.target, box.size, box.source_stride, box.target_stride
        )
        if normal != box:
            return f"a box of {spec.name!r} in {memory.name!r} is not in normal form"
        if box.source_region.last >= spec.numel or target.last >= memory.numel:
            return f"a box of {spec.name!r} in {memory.name!r} goes beyond {spec.numel} or {memory.numel} elements"
        return None

    def _collisions(self, catalog: Catalog) -> list[str]:
        """Tensors that claim the same live element."""
        per_memory: dict[int, list[Box]] = {}
        for box in self.boxes:
            per_memory.setdefault(box.memory, []).append(box)
        return [
            f"{catalog.tensors[boxes[i].tensor].name!r} and {catalog.tensors[boxes[j].tensor].name!r} "
            f"both lie in the same elements of {self.memories[memory].name!r}"
            for memory, boxes in per_memory.items()
            for i, j in overlaps([box.target_region for box in boxes])
        ]


_HINT: Final = "run the same release of deltasync in the subscriber and in SGLang"


@dataclass(frozen=True, slots=True)
class Place:
    """One box of a tensor: box number `box` in the map of rank number `rank`.

    `replica_of`: None for an owner, else the (rank, box) that owns exactly the same canonical elements.
    """

    rank: int
    box: int
    replica_of: tuple[int, int] | None

    @property
    def owner(self) -> bool:
        return self.replica_of is None


class Layout:
    """Who owns each canonical element over the maps of all ranks of one server.

    The owner is the first box in rank order that covers an element; other boxes of exactly the same elements are its
    replicas. `places[t]`: every box of tensor t, in (rank, box) order. Raises EngineMismatch naming every tensor
    whose elements the owners do not cover exactly once.
    """

    def __init__(self, catalog: Catalog, ranks: Sequence[BoxMap]) -> None:
        places: list[list[Place]] = [[] for _ in catalog.tensors]
        owners: list[dict[Region, tuple[int, int]]] = [{} for _ in catalog.tensors]
        for rank, map_ in enumerate(ranks):
            for number, box in enumerate(map_.boxes):
                first = owners[box.tensor].setdefault(box.source_region, (rank, number))
                places[box.tensor].append(Place(rank, number, None if first == (rank, number) else first))
        self.places: tuple[tuple[Place, ...], ...] = tuple(map(tuple, places))
        problems = []
        for spec, regions in zip(catalog.tensors, owners, strict=True):
            held = sum(region.numel for region in regions)
            if any(overlaps(list(regions))):
                problems.append(f"{spec.name!r} is held in pieces that overlap only partly")
            elif held != spec.numel:
                problems.append(f"{spec.name!r} has {spec.numel} elements, the engine holds {held}")
        if problems:
            raise EngineMismatch(
                f"the engine does not hold the stream's tensors exactly once: {name_offenders(problems)}",
                hint="serve the very architecture that is trained, with every rank's plugin answering",
            )
