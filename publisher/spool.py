"""Files that a trainer shares with the publisher process: the optimizer state itself, and where what lies in it.

`<id>.state`: a page whose first 8 bytes are the number that the trainer holds still for, then raw tensor memory.
`<id>.layout`: msgpack, written once and atomically. The trainer keeps a lock on its state file while it lives.
"""

import fcntl
import mmap
import os
import re
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import msgpack
import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chunkstore.crashpoints import crash_point
from chunkstore.dtypes import WIDTH
from chunkstore.torch_dtypes import TORCH_DTYPES
from manifest.catalog import MAX_TENSORS
from manifest.errors import LocalDiskError
from publisher.errors import SpoolInvalid

HEADER: Final = 4096
"""Bytes before the first tensor."""
ALIGNMENT: Final = 64
"""Bytes; torch's own allocator aligns so, and kernels may choose their path by it."""
MAX_LAYOUT_BYTES: Final = 256 << 20
_ROOM: Final = "the spool needs room for all weights and moments: a larger /dev/shm (docker: --shm-size)"
_STATE_NAME: Final = re.compile(r"[0-9a-f]{32}\.(state|new)")

Moment = Literal["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
"""A kind of optimizer state, by torch's own name."""

_Size = Annotated[int, Field(ge=0, lt=1 << 48)]


class Place(BaseModel):
    """One tensor in the state file: safetensors dtype, shape and strides in elements, first element's byte offset."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    dtype: str
    shape: list[_Size] = Field(max_length=16)
    stride: list[_Size] = Field(max_length=16)
    offset: _Size

    def problem(self, size: int) -> str | None:
        """Why this cannot be a tensor in a file of `size` bytes, or None."""
        width = WIDTH.get(self.dtype)
        if width is None:
            return f"unknown dtype {self.dtype!r:.20}"
        if len(self.shape) != len(self.stride):
            return "as many strides as dimensions are needed"
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        if prod(self.shape) * width > size:
            return f"shape {self.shape} is more than the file of {size} bytes"
        end = self.offset if 0 in self.shape else self.offset + (last + 1) * width
        if self.offset % width or not HEADER <= self.offset <= end <= size:
            return f"bytes {self.offset} … {end} are not inside the file of {size} bytes"
        return None


class Layout(BaseModel):
    """Everything in a state file: tensors by canonical name, aliases too, and their Adam moments by torch's names."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: Literal[1] = 1
    nbytes: _Size
    tensors: dict[str, Place] = Field(max_length=MAX_TENSORS)
    moments: dict[str, dict[Moment, Place]] = Field(max_length=MAX_TENSORS)

    def places(self) -> Iterator[tuple[str, Place]]:
        yield from self.tensors.items()
        for name, moments in self.moments.items():
            yield from ((f"{key} of {name}", place) for key, place in moments.items())


class StateFile:
    """A mapped state file. `create` it in the trainer, `open` it in the publisher process."""

    def __init__(self, path: Path, memory: mmap.mmap, lock: int | None) -> None:
        self.path = path
        self.memory = memory
        self._lock = lock
        self._word = np.frombuffer(memory, "<u8", 1)  # one aligned 64-bit load or store

    @property
    def id(self) -> str:
        return self.path.stem

    @classmethod
    def create(cls, spool: Path, nbytes: int) -> Self:
        """A new file of `nbytes`, locked for this process. Raises LocalDiskError; memory is reserved at once."""
        path = spool / f"{secrets.token_hex(16)}.state"
        hidden = path.with_suffix(".new")
        descriptor = -1
        try:
            spool.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone_in(spool):  # else it could be taken for a dead trainer's before it is locked
                descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, nbytes)  # else a full file system would be a SIGBUS later
            memory = mmap.mmap(descriptor, nbytes)
            crash_point("spool.before_state")
            hidden.rename(path)
            crash_point("spool.after_state")
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
                hidden.unlink(missing_ok=True)
            raise LocalDiskError(
                f"cannot share {nbytes} bytes of optimizer state in spool {spool}: {error}",
                hint=_ROOM,
            ) from error
        return cls(path, memory, descriptor)

    @classmethod
    def open(cls, spool: Path, state: str, nbytes: int) -> Self:
        """An existing file, to be read only. Raises SpoolInvalid unless it has exactly `nbytes`."""
        path = spool / f"{state}.state"
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != nbytes or size < HEADER:
                    raise SpoolInvalid(f"{path} has {size} bytes, its layout says {nbytes}")
                return cls(path, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), None)
        except OSError as error:
            raise _unreadable(path, error) from error

    def tensor(self, place: Place) -> torch.Tensor:
        """The tensor at `place`, which has no `problem`: a view of the file's memory."""
        dtype = TORCH_DTYPES[place.dtype]
        if 0 in place.shape:
            return torch.empty(place.shape, dtype=dtype)
        width = WIDTH[place.dtype]
        last = sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
        return self.region(place.offset, (last + 1) * width).view(dtype).as_strided(place.shape, place.stride)

    def region(self, offset: int, nbytes: int) -> torch.Tensor:
        """Raw memory as uint8, with a storage of its own."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # we only read it
            return torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes, offset=offset)

    @property
    def held_for(self) -> int:
        """The number the trainer holds still for, 0 if it may be writing.

        Read it after reading tensors: if it still is the number asked for, they were not touched meanwhile.
        """
        return int(self._word[0])

    @contextmanager
    def held(self, seq: int) -> Iterator[None]:
        """Within, this thread, the only one that writes the state, holds it still for request `seq`."""
        self._word[0] = seq
        try:
            yield
        finally:
            self._word[0] = 0

    def remove(self) -> None:
        """Delete the files. Memory stays mapped as long as tensors live in it."""
        _remove_files(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def write_layout(state: StateFile, layout: Layout) -> None:
    """Beside the state file, atomically. Raises LocalDiskError."""
    path = state.path.with_suffix(".layout")
    temporary = path.with_suffix(".layout-new")
    try:
        temporary.write_bytes(msgpack.packb(layout.model_dump()))
        crash_point("spool.before_layout")
        temporary.rename(path)
        crash_point("spool.after_layout")
    except OSError as error:
        raise LocalDiskError(f"cannot write {path}: {error}", hint=_ROOM) from error


def _remove_files(state: Path) -> None:
    """All that belongs to a state file, and itself last: what is left without it, nobody would find."""
    for suffix in (".layout-new", ".layout", state.suffix):
        state.with_suffix(suffix).unlink(missing_ok=True)
        crash_point("spool.mid_remove")


@dataclass(frozen=True)
class MappedState:
    """A trainer's state as the publisher process sees it; tensors are views of shared memory."""

    file: StateFile
    tensors: dict[str, torch.Tensor]
    moments: dict[str, dict[Moment, torch.Tensor]]

    @classmethod
    def open(cls, spool: Path, state: str) -> Self:
        """Map state `state`. Raises SpoolInvalid naming what does not fit; nothing is believed unchecked."""
        layout = _read_layout(spool / f"{state}.layout")
        problems = [
            f"{name}: {problem}"
            for name, place in layout.places()
            if (problem := place.problem(layout.nbytes))
        ]
        if problems:
            raise SpoolInvalid(f"the layout of state {state} is impossible: " + "; ".join(problems[:10]))
        file = StateFile.open(spool, state, layout.nbytes)
        return cls(
            file,
            {name: file.tensor(place) for name, place in layout.tensors.items()},
            {
                name: {key: file.tensor(place) for key, place in moments.items()}
                for name, moments in layout.moments.items()
            },
        )


def _read_layout(path: Path) -> Layout:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LAYOUT_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(data) > MAX_LAYOUT_BYTES:
        raise SpoolInvalid(f"{path} is larger than {MAX_LAYOUT_BYTES} bytes")
    try:
        return Layout.model_validate(msgpack.unpackb(data, strict_map_key=True))
    except (ValueError, msgpack.exceptions.UnpackException) as error:  # ValidationError is a ValueError
        detail = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise SpoolInvalid(f"{path} is not a layout: {detail:.500}") from error


def _unreadable(path: Path, error: OSError) -> SpoolInvalid:
    return SpoolInvalid(
        f"cannot read {path}: {error}",
        hint="trainer and publisher process must see the same spool folder, as the same user",
    )


def remove_stale(spool: Path) -> None:
    """Delete the state of trainers that are gone: nobody holds its lock, and it fills memory."""
    if not spool.is_dir():
        return
    with _alone_in(spool):
        for path in [p for p in spool.iterdir() if _STATE_NAME.fullmatch(p.name)]:
            _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # its trainer was faster
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # its trainer lives
    else:
        _remove_files(path)
    finally:
        os.close(descriptor)


@contextmanager
def _alone_in(spool: Path) -> Iterator[None]:
    """Within, nobody else creates state files in `spool` or removes stale ones. For moments only."""
    folder = os.open(spool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
