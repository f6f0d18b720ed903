"""What the daemon and the plugin say to each other: small requests over HTTP, large arrays through shared files.

A request is the free `action` string of SGLang's `/weights_checker`: PREFIX and a JSON object whose `op` names what to
do. Every rank answers with one acknowledgement, a JSON object; the reply's message is the JSON list of them.

An *order* names the live elements of one rank that an update touches. In its directory, per rank:
`<rank>.order`     its pieces (msgpack), which the request's hash covers
`<rank>.targets`   per piece, where its runs begin: uint32 relative to the piece's base
`<rank>.old`       written by the rank: the live bits of all its elements, in order
`<rank>.new`       the bits to write, in the same order
The last three end with one xxh3_64 per piece (uint64), checked whenever a piece is read.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Self

import blake3
import msgpack
import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chunkstore.codec import WINDOW
from chunkstore.dtypes import WIDTH, Bits, bits_dtype
from chunkstore.regions import Indices
from subscriber.errors import StagedLost
from subscriber.sglang.boxes import Memory

PROTOCOL: Final = 2
PREFIX: Final = "deltasync:"
NOT_PAUSED: Final = "not_paused"
"""Kind of a refusal to write that another pause will cure."""
ORDER_FORMAT: Final = 1
MAX_ORDER_BYTES: Final = 512 << 20

_Count = Annotated[int, Field(ge=0, lt=1 << 48)]


def file_hash(data: bytes) -> str:
    """blake3 of a file's bytes as hex; requests name what they point at by it."""
    return blake3.blake3(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Piece:
    """Runs of `run` consecutive elements of memory number `memory`; `count` of them, in any order, none twice.

    `base`: the lowest element that a run begins at.
    """

    memory: int
    run: int
    base: int
    count: int

    @property
    def elements(self) -> int:
        return self.run * self.count


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: int
    map: str
    pieces: tuple[tuple[_Count, Annotated[int, Field(ge=1, le=WINDOW)], _Count, _Count], ...]


@dataclass(frozen=True, slots=True)
class Order:
    """All pieces of one rank. `map`: hash of the rank's map (`file_hash`) whose memories are numbered."""

    map: str
    pieces: tuple[Piece, ...]

    def to_bytes(self) -> bytes:
        packed = msgpack.packb(
            {"format": ORDER_FORMAT, "map": self.map, "pieces": [astuple(piece) for piece in self.pieces]}
        )
        assert isinstance(packed, bytes)
        return packed

    @classmethod
    def from_bytes(cls, data: bytes, memories: Sequence[Memory]) -> Self:
        """Parse and check against a rank's memories. Raises StagedLost."""
        try:
            wire = _Wire.model_validate(msgpack.unpackb(data, use_list=False))
        except (ValueError, msgpack.exceptions.UnpackException, ValidationError) as error:
            raise _lost(f"an order cannot be read: {error!s:.500}") from error
        order = cls(wire.map, tuple(Piece(*piece) for piece in wire.pieces))
        for piece in order.pieces:
            if piece.memory >= len(memories) or piece.elements > WINDOW:
                raise _lost(f"an order names {piece}, which cannot be")
        if wire.format != ORDER_FORMAT:
            raise _lost("an order was written by another release")
        return order


class ArrayWriter:
    """Writes one of an order's array files piece by piece. A context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hashes: list[int] = []

    def add(self, array: npt.NDArray[Any]) -> None:
        """Append one piece."""
        data = np.ascontiguousarray(array).view(np.uint8).data
        self._file.write(data)
        self._hashes.append(xxhash.xxh3_64_intdigest(data))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._file.write(np.array(self._hashes, "<u8").tobytes())
        self._file.close()


class ArrayReader:
    """Reads pieces of `sizes` bytes from one of an order's array files, which stays open, and so outlives its name.

    Raises StagedLost whenever the file is not what was written.
    """

    def __init__(self, path: Path, sizes: Sequence[int]) -> None:
        ends = np.cumsum([0, *sizes])
        self._positions, self._sizes, self._path = ends.tolist(), sizes, path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise _lost(f"{path} cannot be opened: {error}") from error
        self._hashes = np.frombuffer(self._pread(int(ends[-1]), 8 * len(sizes)), "<u8")
        if os.fstat(self._file.fileno()).st_size != int(ends[-1]) + 8 * len(sizes):
            raise _lost(f"{path} is longer than its pieces")

    def read(self, piece: int) -> bytearray:
        """The bytes of piece number `piece`."""
        data = self._pread(self._positions[piece], self._sizes[piece])
        if xxhash.xxh3_64_intdigest(data) != self._hashes[piece]:
            raise _lost(f"{self._path}: piece {piece} is damaged")
        return data

    def _pread(self, position: int, size: int) -> bytearray:
        data = bytearray(size)
        try:
            read = os.preadv(self._file.fileno(), [data], position) if size else 0
        except OSError as error:
            raise _lost(f"{self._path} cannot be read: {error}") from error
        if read != size:
            raise _lost(f"{self._path} is shorter than its pieces")
        return data

    def close(self) -> None:
        self._file.close()


class RankFiles:
    """An order and its arrays in `directory`, seen from either side."""

    def __init__(self, directory: Path, rank: int, order: Order, memories: Sequence[Memory]) -> None:
        self._stem = directory / str(rank)
        self.order = order
        self._widths = [WIDTH[memories[piece.memory].dtype] for piece in order.pieces]
        self._dtypes = [bits_dtype(memories[piece.memory].dtype) for piece in order.pieces]
        self._last = [memories[piece.memory].numel for piece in order.pieces]

    def write_order(self) -> str:
        """Write the order itself. Returns its hash."""
        data = self.order.to_bytes()
        self.path("order").write_bytes(data)
        return file_hash(data)

    @classmethod
    def load(cls, directory: Path, rank: int, order_hash: str, memories: Sequence[Memory]) -> Self:
        """Read an order that was written with `order_hash`. Raises StagedLost."""
        path = directory / f"{rank}.order"
        try:
            if path.stat().st_size > MAX_ORDER_BYTES:
                raise _lost(f"{path} is larger than {MAX_ORDER_BYTES} bytes")
            data = path.read_bytes()
        except OSError as error:
            raise _lost(f"{path} cannot be read: {error}") from error
        if file_hash(data) != order_hash:
            raise _lost(f"{path} is not what was written")
        return cls(directory, rank, Order.from_bytes(data, memories), memories)

    def path(self, kind: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{kind}")

    @property
    def nbytes(self) -> int:
        """Size of the targets and two arrays of values, in bytes."""
        return sum(
            4 * piece.count + 2 * width * piece.elements
            for piece, width in zip(self.order.pieces, self._widths, strict=True)
        )

    def writer(self, kind: str) -> ArrayWriter:
        """For `targets`, `old` or `new`."""
        return ArrayWriter(self.path(kind))

    def open_targets(self) -> "Targets":
        return Targets(
            ArrayReader(self.path("targets"), [4 * piece.count for piece in self.order.pieces]),
            self.order.pieces,
            self._last,
        )

    def open_values(self, kind: str) -> "Values":
        """For `old` or `new`."""
        sizes = [p.elements * width for p, width in zip(self.order.pieces, self._widths, strict=True)]
        return Values(ArrayReader(self.path(kind), sizes), self._dtypes)


class Targets:
    """Where each piece's runs begin, as elements of its memory; int64."""

    def __init__(self, reader: ArrayReader, pieces: Sequence[Piece], numels: Sequence[int]) -> None:
        self._reader, self._pieces, self._numels = reader, pieces, numels

    def __getitem__(self, number: int) -> Indices:
        """Raises StagedLost if the file is damaged, or a run would leave its memory."""
        piece = self._pieces[number]
        targets = np.frombuffer(self._reader.read(number), "<u4").astype(np.int64) + piece.base
        if len(targets) and int(targets.max()) + piece.run > self._numels[number]:
            raise _lost(f"an order's piece {number} goes beyond its memory")
        return targets

    def __iter__(self) -> Iterator[Indices]:
        return (self[number] for number in range(len(self._pieces)))


class Values:
    """The bits of each piece's elements."""

    def __init__(self, reader: ArrayReader, dtypes: Sequence[np.dtype[Any]]) -> None:
        self._reader, self._dtypes = reader, dtypes

    def __getitem__(self, number: int) -> Bits:
        """Raises StagedLost if the file is damaged."""
        return np.frombuffer(self._reader.read(number), self._dtypes[number])

    def __iter__(self) -> Iterator[Bits]:
        return (self[number] for number in range(len(self._dtypes)))


def _lost(why: str) -> StagedLost:
    return StagedLost(why, hint="the subscriber stages the update again by itself")
