"""What was done to one engine, in one small file per boot id: written before and after each apply."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from chunkstore.crashpoints import crash_point
from subscriber.disk import check_writable, disk_errors
from subscriber.errors import SubscriberBusy

FORMAT: Final = 1
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class AppliedRecord:
    """A version that was applied and verified: root digest and manifest hash as hex."""

    version: int
    root: str
    manifest_hash: str


@dataclass(frozen=True, slots=True)
class ApplyingRecord:
    """An apply that may have begun to write: the staged update's directory and the hash of its index, as hex."""

    version: int
    staged: str
    index_hash: str


@dataclass(frozen=True, slots=True)
class Entry:
    """`stream`: hex id. Both records None: what the engine holds is not known to be any version."""

    stream: str
    applied: AppliedRecord | None = None
    applying: ApplyingRecord | None = None


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: int
    boot_id: str
    entry: Entry


class _HighWater(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: int
    stream: str
    version: int


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make `directory`, and let no other process use it while the block runs.

    Raises SubscriberBusy, StagingUnavailable.
    """
    check_writable(directory)
    with disk_errors(directory):
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _busy(directory, "give each subscriber of a host its own `id`") from error
        yield
    finally:
        os.close(lock)


@contextmanager
def locked_folder(directory: Path) -> Iterator[None]:
    """As `locked`, but without a file in `directory`, in which everything is part of an update.

    Raises SubscriberBusy, StagingUnavailable.
    """
    check_writable(directory)
    with disk_errors(directory):
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            hint = "give each subscriber of a host its own `id`, or its own staging_dir"
            raise _busy(directory, hint) from error
        except OSError:
            pass  # some network file systems lock files alone: nobody is refused there
        yield
    finally:
        os.close(folder)


def _busy(directory: Path, hint: str) -> SubscriberBusy:
    return SubscriberBusy(f"another subscriber uses {directory}", hint=hint)


class Journal:
    """The journal of one engine's life, named by `begin`, in `directory`, which the process has locked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self, boot_id: str) -> None:
        """From now on the journal of the life `boot_id`; those of lives that have ended are removed."""
        if not _NAME.fullmatch(boot_id):
            raise ValueError(f"boot id {boot_id!r} cannot be a file name")
        self._boot_id = boot_id
        self._path = self._directory / f"journal-{boot_id}.json"
        with disk_errors(self._directory):
            for other in [*self._directory.glob("journal-*"), *self._directory.glob("*.tmp")]:
                if other != self._path:
                    other.unlink(missing_ok=True)
                    crash_point("journal.mid_begin")

    def read(self) -> Entry | None:
        """The last entry, or None if there is none, or a damaged one: then nothing is known.

        Raises StagingUnavailable.
        """
        try:
            with disk_errors(self._directory):
                data = self._path.read_bytes() if self._path.exists() else b""
            wire = _Wire.model_validate_json(data)
        except ValidationError:
            return None
        return wire.entry if wire.format == FORMAT and wire.boot_id == self._boot_id else None

    def write(self, entry: Entry) -> None:
        """Replace the entry atomically; durable on return. Raises StagingFull, StagingUnavailable."""
        self._replace(self._path, {"format": FORMAT, "boot_id": self._boot_id, "entry": asdict(entry)})

    @property
    def high_water(self) -> Path:
        """The file of `reached`."""
        return self._directory / "reached.json"

    def reached(self, stream: str) -> int:
        """The highest version of `stream` (hex id) that any life of the engine was brought to, −1 if none is known.

        Raises StagingUnavailable.
        """
        try:
            with disk_errors(self._directory):
                data = self.high_water.read_bytes() if self.high_water.exists() else b""
            mark = _HighWater.model_validate_json(data)
        except ValidationError:
            return -1
        return mark.version if (mark.format, mark.stream) == (FORMAT, stream) else -1

    def reach(self, stream: str, version: int) -> None:
        """Raise `reached` to `version`; durable on return. Raises StagingFull, StagingUnavailable."""
        if version > self.reached(stream):
            self._replace(self.high_water, {"format": FORMAT, "stream": stream, "version": version})

    def _replace(self, path: Path, data: dict[str, Any]) -> None:
        temporary = path.with_suffix(".tmp")
        with disk_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("w") as file:
                    json.dump(data, file)
                    file.flush()
                    os.fsync(file.fileno())
                crash_point("journal.before_rename")
                temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)
            crash_point("journal.after_rename")
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
