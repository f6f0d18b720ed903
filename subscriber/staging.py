"""A staged update: values as raw arrays in local files, kept until the apply is recorded.

Only one whose values are all absolute is ever applied, or reopened. One that holds differences is an intermediate:
the engine's `prepare` resolves them against the live weights into another staged update, inside its directory.

Layout of its directory: `values.bin` holds, per piece, its offsets (uint32), its values, little-endian, and for a
piece with differences one bit per value that says which are;
`manifest.msgpack` and `catalog.msgpack` say what it leads to; `index.msgpack`, written last, lists the pieces.
Nothing is fsynced: these files only have to outlive a process; a lost machine loses the engine too, and every
piece is checked against its length and hash whenever it is read.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import blake3
import msgpack
import numpy as np
import xxhash

from chunkstore.codec import WINDOW
from chunkstore.crashpoints import crash_point
from chunkstore.digest import U64
from chunkstore.dtypes import Bits, bits_dtype
from chunkstore.errors import DeltasyncError
from manifest.catalog import Catalog
from manifest.merge import Update
from manifest.plan import Applied
from manifest.schema import Manifest
from subscriber.errors import StagedLost

FORMAT: Final = 2
_INDEX: Final = "index.msgpack"
_VALUES: Final = "values.bin"
_MANIFEST: Final = "manifest.msgpack"
_CATALOG: Final = "catalog.msgpack"


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A version that the engine holds, verified: its root digest and all its digests, in catalog order.

    `manifest_hash`: 32 bytes, None where only the weights are known.
    """

    version: int
    root: bytes
    manifest_hash: bytes | None
    digests: U64

    @property
    def applied(self) -> Applied:
        """The same for planning."""
        return Applied(self.version, self.root, self.manifest_hash)


@dataclass(frozen=True, slots=True)
class Piece:
    """One update inside `values.bin`: flat indices `start` … `stop` of a tensor, `count` elements stored.

    `relative`: some of its values are differences to the base.
    """

    tensor: int
    start: int
    stop: int
    whole: bool
    count: int
    relative: bool
    position: int
    nbytes: int
    hash: int  # xxh3_64 of the piece's bytes


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """Everything an engine needs to go to `target`.

    `base`: what must be live before; None for an update that holds every tensor whole, and for one that was
    reopened, which may only be written again. `hash`: of the index, 32 bytes, for the journal.
    """

    path: Path
    catalog: Catalog
    base: Held | None
    target: Manifest
    pieces: tuple[Piece, ...]
    hash: bytes

    @property
    def elements(self) -> int:
        """Elements stored."""
        return sum(piece.count for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Size of the staged values, in bytes."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def relative(self) -> bool:
        """Whether some values are still differences to the base: then it cannot be applied."""
        return any(piece.relative for piece in self.pieces)

    def updates(self) -> Iterator[Update]:
        """The pieces in file order, each read and checked when its turn comes. Raises StagedLost."""
        with self.open() as updates:
            yield from updates

    @contextmanager
    def open(self) -> "Iterator[UpdateReader]":
        """The pieces by number, in any order. Raises StagedLost."""
        try:
            file = (self.path / _VALUES).open("rb")
        except OSError as error:
            raise _lost(self.path, str(error)) from error
        with file:
            yield UpdateReader(self, file)

    def _update(self, piece: Piece, file: BinaryIO) -> Update:
        data = bytearray(piece.nbytes)
        try:
            read = os.preadv(file.fileno(), [data], piece.position)
        except OSError as error:
            raise _lost(self.path, str(error)) from error
        if read != piece.nbytes or xxhash.xxh3_64_intdigest(data) != piece.hash:
            name = self.catalog.tensors[piece.tensor].name
            raise _lost(self.path, f"the values of {name!r} at {piece.start} are not those that were written")
        values_dtype = bits_dtype(self.catalog.tensors[piece.tensor].dtype)
        split = 0 if piece.whole else piece.count * 4
        offsets = None if piece.whole else np.frombuffer(data, "<u4", piece.count)
        values: Bits = np.frombuffer(data, values_dtype, piece.count, split)
        relative = None
        if piece.relative:
            packed = np.frombuffer(data, np.uint8, offset=split + values.nbytes)
            relative = np.unpackbits(packed, count=piece.count).view(np.bool_)
        return Update(piece.tensor, piece.start, piece.stop, offsets, values, relative)


class UpdateReader:
    """The updates of a staged update whose file is open."""

    def __init__(self, staged: StagedUpdate, file: BinaryIO) -> None:
        self._staged, self._file = staged, file

    def __getitem__(self, number: int) -> Update:
        """Update number `number`, read and checked. Raises StagedLost."""
        return self._staged._update(self._staged.pieces[number], self._file)

    def __iter__(self) -> Iterator[Update]:
        return (self[number] for number in range(len(self._staged.pieces)))


class StagingWriter:
    """Writes a staged update piece by piece; `finish` makes it complete. Use it as a context manager."""

    def __init__(self, path: Path, catalog: Catalog, base: Held | None, target: Manifest) -> None:
        self._path, self._catalog, self._base, self._target = path, catalog, base, target
        self._pieces: list[Piece] = []
        self._position = 0
        path.mkdir(parents=True)
        self._file = (path / _VALUES).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, update: Update) -> None:
        """Append one window's update."""
        offsets = b"" if update.offsets is None else update.offsets.astype("<u4", copy=False).tobytes()
        relative = b"" if update.relative is None else np.packbits(update.relative).tobytes()
        data = offsets + update.values.tobytes() + relative
        self._file.write(data)
        self._pieces.append(
            Piece(
                tensor=update.tensor,
                start=update.start,
                stop=update.stop,
                whole=update.offsets is None,
                count=len(update.values),
                relative=update.relative is not None,
                position=self._position,
                nbytes=len(data),
                hash=xxhash.xxh3_64_intdigest(data),
            )
        )
        self._position += len(data)

    def finish(self) -> StagedUpdate:
        """Complete the update and return it as it can be read back."""
        self._file.close()
        (self._path / _MANIFEST).write_bytes(self._target.data)
        (self._path / _CATALOG).write_bytes(self._catalog.data)
        index = msgpack.packb(
            {
                "format": FORMAT,
                "manifest": self._target.hash,
                "pieces": [[getattr(p, f) for f in Piece.__slots__] for p in self._pieces],
            }
        )
        crash_point("subscriber.mid_stage")
        (self._path / _INDEX).write_bytes(index)
        digest = blake3.blake3(index).digest()
        pieces = tuple(self._pieces)
        return StagedUpdate(self._path, self._catalog, self._base, self._target, pieces, digest)


def load_staged(path: Path, index_hash: bytes) -> StagedUpdate:
    """Reopen a staged update that this or an earlier process finished.

    Raises StagedLost unless the index has the hash (32 bytes) that the journal holds and its parts fit
    together.
    """
    try:
        index = (path / _INDEX).read_bytes()
        if blake3.blake3(index).digest() != index_hash:
            raise _lost(path, "its index is not the one that was recorded")
        target = Manifest.from_bytes((path / _MANIFEST).read_bytes(), name=str(path / _MANIFEST))
        catalog = Catalog.from_bytes((path / _CATALOG).read_bytes())
    except (OSError, DeltasyncError) as error:
        raise _lost(path, str(error)) from error
    raw: Any = msgpack.unpackb(index)
    if raw["format"] != FORMAT:
        raise _lost(path, "it was written by another release")
    if raw["manifest"] != target.hash or target.catalog != catalog.hash:
        raise _lost(path, "its manifest and catalog are not those that were staged")
    pieces = tuple(Piece(*record) for record in raw["pieces"])
    _check_pieces(path, catalog, pieces)
    return StagedUpdate(path, catalog, None, target, pieces, index_hash)


def _check_pieces(path: Path, catalog: Catalog, pieces: tuple[Piece, ...]) -> None:
    for piece in pieces:
        spec = catalog.tensors[piece.tensor]
        size = (
            piece.count * (spec.width + (0 if piece.whole else 4)) + (piece.count + 7) // 8 * piece.relative
        )
        inside = 0 <= piece.start < piece.stop <= spec.numel and piece.stop - piece.start <= WINDOW
        if not inside or piece.nbytes != size:
            raise _lost(path, f"a piece of {spec.name!r} does not fit the catalog")
        if piece.relative:
            raise _lost(path, f"a piece of {spec.name!r} was never resolved")


def _lost(path: Path, why: str) -> StagedLost:
    return StagedLost(
        f"staged update {path} cannot be used: {why}",
        hint="the subscriber starts again from an anchor by itself",
    )
