"""The daemon's side of an order: canonical updates to every rank's live elements, old bits back, new bits out.

Each element that an update gives lies in some boxes: in one rank, or in several where heads or norms are replicated.
An order lists a rank's elements by memory and place, so that few large pieces are read and written there whatever the
number of canonical tensors. Memory: a few windows of elements, and a few numbers per box and window.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np

from chunkstore.codec import WINDOW
from chunkstore.dtypes import Bits, bits_dtype
from chunkstore.regions import Indices
from manifest.merge import Update
from subscriber.errors import VerificationFailed
from subscriber.sglang.boxes import Box, BoxMap, Layout, locate, runs
from subscriber.sglang.wire import ArrayWriter, Order, Piece, RankFiles
from subscriber.staging import StagedUpdate
from subscriber.threads import Check

T = TypeVar("T")

_CACHED: Final = 6  # updates, or pieces of a rank, kept at hand
_SPAN: Final = 1 << 32  # targets are written as uint32 from a piece's base


@dataclass(frozen=True, slots=True)
class _Entry:
    """Part of what update number `update` gives of box number `box`: in canonical order, `count` elements after
    `skip`. They stand in piece number `piece` of the order from its element `first`.
    """

    update: int
    box: int
    skip: int
    count: int
    piece: int
    first: int


class Exchange:
    """Orders for all ranks, made from `staged`, in the new directory `directory`.

    `hashes`: of the ranks' maps. `orders`: the hash of each rank's order, for requests.
    """

    def __init__(
        self,
        directory: Path,
        staged: StagedUpdate,
        maps: Sequence[BoxMap],
        hashes: Sequence[str],
        layout: Layout,
        check: Check,
    ) -> None:
        directory.mkdir(parents=True)
        self._staged, self._maps, self._check = staged, maps, check
        self._entries: list[list[_Entry]] = []
        self._files: list[RankFiles] = []
        self.orders: list[str] = []
        self._by_update: dict[int, list[tuple[int, _Entry]]] = defaultdict(list)
        with staged.open() as updates:
            cached = _Cache(updates.__getitem__)
            for rank, (map_, map_hash) in enumerate(zip(maps, hashes, strict=True)):
                wanted = _wanted(staged, rank, map_, layout)
                entries, pieces = self._targets(directory / f"{rank}.targets", map_, wanted, cached)
                self._entries.append(entries)
                self._files.append(RankFiles(directory, rank, Order(map_hash, pieces), map_.memories))
                self.orders.append(self._files[-1].write_order())
                for entry in entries:
                    self._by_update[entry.update].append((rank, entry))

    def _targets(
        self, path: Path, map_: BoxMap, wanted: list[tuple[int, int]], updates: "_Cache[Update]"
    ) -> tuple[list[_Entry], tuple[Piece, ...]]:
        """Write the targets of one rank: `wanted` are (box, update) pairs in the order they are to stand in."""
        entries: list[_Entry] = []
        with ArrayWriter(path) as writer:
            pieces = _Pieces(writer)
            for number, update in wanted:
                self._check()
                box, skip = map_.boxes[number], 0
                for targets, run in _places(box, updates[update]):
                    piece, first = pieces.add(box.memory, run, targets)
                    entries.append(_Entry(update, number, skip, len(targets) * run, piece, first))
                    skip += len(targets) * run
            pieces.flush()
        return entries, tuple(pieces.done)

    def gather(self) -> Callable[[Update], list[Bits]]:
        """The live bits that the ranks have read, for `verify`, which asks for every update once and in order.

        Raises VerificationFailed if ranks that hold the same elements disagree, StagedLost.
        """
        olds = [_Cache(files.open_values("old").__getitem__) for files in self._files]
        numbers = iter(range(len(self._staged.pieces)))
        return lambda update: [self._old(next(numbers), update, olds)]

    def _old(self, number: int, update: Update, olds: "list[_Cache[Bits]]") -> Bits:
        spec = self._staged.catalog.tensors[update.tensor]
        bits: Bits = np.empty(len(update.values), bits_dtype(spec.dtype))
        given = np.zeros(len(bits), np.bool_)
        for rank, entry in self._by_update[number]:
            part = olds[rank][entry.piece][entry.first : entry.first + entry.count]
            where = _positions(self._maps[rank].boxes[entry.box], update, entry)
            again = given[where]
            if not np.array_equal(bits[where][again], part[again]):
                raise VerificationFailed(
                    f"the server's ranks hold different values of {spec.name!r}; nothing was written",
                    hint="the subscriber restores them from an anchor by itself",
                )
            bits[where], given[where] = part, True
        assert given.all(), "a layout covers every element"
        return bits

    def write(self, resolved: StagedUpdate) -> None:
        """Write the bits of `resolved`, which gives the same elements as `staged`, for every rank to load."""
        with resolved.open() as updates:
            cached = _Cache(updates.__getitem__)
            for rank, files in enumerate(self._files):
                by_piece: dict[int, list[_Entry]] = defaultdict(list)
                for entry in self._entries[rank]:
                    by_piece[entry.piece].append(entry)
                with files.writer("new") as writer:
                    for number, piece in enumerate(files.order.pieces):
                        self._check()
                        writer.add(self._new(rank, piece, by_piece[number], cached))

    def _new(self, rank: int, piece: Piece, entries: list[_Entry], updates: "_Cache[Update]") -> Bits:
        map_ = self._maps[rank]
        out: Bits = np.empty(piece.elements, bits_dtype(map_.memories[piece.memory].dtype))
        for entry in entries:
            update = updates[entry.update]
            where = _positions(map_.boxes[entry.box], update, entry)
            out[entry.first : entry.first + entry.count] = update.values[where]
        return out


class _Pieces:
    """Collects runs into pieces: as many as fit, of one memory and one length."""

    def __init__(self, writer: ArrayWriter) -> None:
        self.done: list[Piece] = []
        self._writer = writer
        self._kind = (-1, 0)  # memory and run of what is being collected
        self._parts: list[Indices] = []
        self._count = 0
        self._low = self._high = 0

    def add(self, memory: int, run: int, targets: Indices) -> tuple[int, int]:
        """Returns the piece that `targets` went to, and which of its elements is the first of them."""
        low, high = int(targets.min()), int(targets.max())
        full = (self._count + len(targets)) * run > WINDOW
        wide = max(high, self._high) - min(low, self._low) >= _SPAN
        if self._kind != (memory, run) or full or wide:
            self.flush()
            self._kind, self._low, self._high = (memory, run), low, high
        first = self._count * run
        self._parts.append(targets)
        self._count += len(targets)
        self._low, self._high = min(low, self._low), max(high, self._high)
        return len(self.done), first

    def flush(self) -> None:
        if self._parts:
            memory, run = self._kind
            self._writer.add((np.concatenate(self._parts) - self._low).astype("<u4"))
            self.done.append(Piece(memory, run, self._low, self._count))
        self._parts, self._count = [], 0


class _Cache(Generic[T]):
    """The values of `read` that were last used."""

    def __init__(self, read: Callable[[int], T]) -> None:
        self._read = read
        self._kept: OrderedDict[int, T] = OrderedDict()

    def __getitem__(self, number: int) -> T:
        if number not in self._kept:
            if len(self._kept) == _CACHED:
                self._kept.popitem(last=False)
            self._kept[number] = self._read(number)
        self._kept.move_to_end(number)
        return self._kept[number]


def _wanted(staged: StagedUpdate, rank: int, map_: BoxMap, layout: Layout) -> list[tuple[int, int]]:
    """Pairs (box, update number) of `rank` that may have elements in common, by memory and place in it."""
    out: list[tuple[int, int]] = []
    for number, piece in enumerate(staged.pieces):
        for place in layout.places[piece.tensor]:
            if place.rank != rank or piece.count == 0:
                continue
            box = map_.boxes[place.box]
            if box.source < piece.stop and box.source_region.last >= piece.start:
                out.append((place.box, number))
    return sorted(out, key=lambda pair: (map_.boxes[pair[0]].memory, map_.boxes[pair[0]].target, pair[1]))


def _places(box: Box, update: Update) -> Iterator[tuple[Indices, int]]:
    """Where in memory the elements of `box` lie that `update` gives, as (first of each run, length of a run)."""
    if update.offsets is None:
        for _, targets, run in runs(box, update.start, update.stop):
            yield targets, run
        return
    _, targets = locate(box, update.offsets.astype(np.int64) + update.start)
    if len(targets):
        yield targets, 1


def _positions(box: Box, update: Update, entry: _Entry) -> slice | Indices:
    """Which values of `update` an entry is about."""
    some = slice(entry.skip, entry.skip + entry.count)
    offsets = update.offsets
    if box.contiguous:
        inside = max(box.source - update.start, 0)
        first = inside if offsets is None else int(np.searchsorted(offsets, np.uint32(inside)))
        return slice(first + some.start, first + some.stop)
    if offsets is not None:
        return locate(box, offsets.astype(np.int64) + update.start)[0][some]
    parts = [
        (sources[:, None] + np.arange(run)).ravel() - update.start
        for sources, _, run in runs(box, update.start, update.stop)
    ]
    return np.concatenate(parts)[some]
