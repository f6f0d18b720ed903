"""A store in a directory of a POSIX file system, local or shared (NFS, Lustre, …).

Objects appear whole or not at all: written to a temporary in the same directory, flushed, then linked (put_if_absent)
or renamed (put) to their name, and every directory up to the root flushed before the call returns.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Final
from uuid import uuid4

from chunkstore.crashpoints import crash_point
from chunkstore.errors import (
    AccessDenied,
    CorruptObject,
    InvalidKey,
    LimitExceeded,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from chunkstore.store import Buffer, ObjectInfo, Store, check_key, is_key
from chunkstore.walk import Entry, walk

TEMPORARY: Final = ".tmp-"
"""How the names of temporaries start. The dot makes them no keys, so listings and readers never see them."""

_OTHER: Final = (
    StoreUnavailable,
    "check that the file system is mounted and lets this user make files there",
)
_MISSING = {errno.ENOENT, errno.ENOTDIR}
_ERRORS: Final[dict[int, tuple[type[StoreError], str]]] = {
    errno.ENOSPC: (StoreFull, "free space on the file system, or run garbage collection"),
    errno.EDQUOT: (StoreFull, "raise the quota, or run garbage collection"),
    errno.EFBIG: (StoreFull, "raise the limit on the size of files (ulimit -f)"),
    errno.EACCES: (AccessDenied, "let this user read and write the directory"),
    errno.EPERM: (AccessDenied, "let this user read and write the directory"),
    errno.EROFS: (AccessDenied, "mount the file system writable"),
    errno.ENOENT: (
        AccessDenied,
        "this directory cannot be made here: check the path and what is mounted there",
    ),
    errno.ENAMETOOLONG: (InvalidKey, "the file system allows no name this long"),
    errno.ENOTDIR: (InvalidKey, "a part of this path is an object; a key cannot lie below another one"),
    errno.EISDIR: (InvalidKey, "other objects lie below this path; a key cannot lie above another one"),
    errno.ELOOP: (StoreUnsuitable, "an object has to be a regular file, not a symbolic link"),
    errno.EINVAL: (StoreUnsuitable, "use a file system with hard links and fsync of directories"),
    errno.ENOSYS: (StoreUnsuitable, "use a file system with hard links and fsync of directories"),
    errno.ENOTSUP: (StoreUnsuitable, "use a file system with hard links and fsync of directories"),
    errno.EMLINK: (StoreUnsuitable, "use a file system with hard links and fsync of directories"),
}


class PosixStore(Store):
    """Objects as files below `root`, which the first write creates, if `make`; else it has to be there for every call.

    A root that was there once is not made anew. It may be a mount that is gone, and what were written below its mount
    point would be in no store.

    `hold`: called in every put_if_absent before the link, so that several can get there at one moment.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, make: bool = True, hold: Callable[[], object] | None = None
    ) -> None:
        self._root = Path(os.path.abspath(root))
        self._make = make
        self._hold = hold
        self._met = False  # whether the root was there once

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def get(self, key: str, *, limit: int) -> bytes:
        with self._errors("get", key), self._open(key) as file:
            size = os.fstat(file).st_size
            if size > limit:
                raise LimitExceeded(f"get {self.url}/{key}: {size} bytes, more than the limit of {limit}")
            return _read(file, 0, size)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._errors("get_range", key), self._open(key) as file:
            size = os.fstat(file).st_size
            if start + length > size:
                raise CorruptObject(
                    f"get_range {self.url}/{key}: the object ends at byte {size}, before byte {start + length}"
                )
            return _read(file, start, length)

    def head(self, key: str) -> ObjectInfo | None:
        with self._errors("head", key):
            try:
                with self._open(key) as file:
                    return _info(key, os.fstat(file))
            except OSError as error:
                if error.errno in _MISSING:
                    self._check_root()
                    return None
                raise

    def put(self, key: str, data: Buffer) -> None:
        path = self._path(key)
        with self._errors("put", key), self._temporary(path, data) as temporary:
            crash_point("chunkstore.posix.before_rename")
            os.replace(temporary, path)
            crash_point("chunkstore.posix.after_rename")
            self._sync(path.parent)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        path = self._path(key)
        with self._errors("put_if_absent", key), self._temporary(path, data) as temporary:
            crash_point("chunkstore.posix.before_link")
            if self._hold is not None:
                self._hold()
            created = self._link(temporary, path)
            crash_point("chunkstore.posix.after_link")
            # Also when the key is taken: its writer may die before it flushes what the caller now builds on.
            self._sync(path.parent)
            return created

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        with self._errors("list", prefix):
            yield from walk(self._entries, prefix, after)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._errors("delete", key):
            crash_point("chunkstore.posix.before_unlink")
            try:
                os.unlink(path)
            except OSError as error:
                # unlink(2) of a directory: EISDIR on Linux, EPERM by POSIX; neither is an object.
                if error.errno in _MISSING or path.is_dir():
                    self._check_root()
                    return
                raise
            crash_point("chunkstore.posix.after_unlink")
            self._prune(path)

    def temporaries(self) -> Iterator[ObjectInfo]:
        with self._errors("list", ""):
            yield from self._temporaries("")

    def delete_temporary(self, name: str) -> None:
        directory, slash, last = name.rpartition("/")
        if not (last.startswith(TEMPORARY) or (slash and not last)) or (slash and not is_key(directory)):
            raise InvalidKey(f"{self.url}/{name!r:.200} is not a temporary")
        path = self._root / directory / (last or TEMPORARY)
        with self._errors("delete", name):
            if last:
                path.unlink(missing_ok=True)
            self._prune(path)

    def _temporaries(self, directory: str) -> Iterator[ObjectInfo]:
        entries = sorted(self._entries(directory), key=itemgetter(0))
        if directory and not entries:  # whoever made or emptied it has died, or is about to go on
            with suppress(FileNotFoundError):
                yield ObjectInfo(directory, 0, os.stat(self._root / directory).st_mtime)
        for entry in entries:
            if entry.is_directory and is_key(entry.name):
                yield from self._temporaries(f"{directory}{entry.name}/")
            elif not entry.is_directory and entry.name.startswith(TEMPORARY):
                info = entry.info()
                if info is not None:
                    yield info

    def _prune(self, path: Path) -> None:
        """Remove the directories above `path`, which is gone, as far as they are empty."""
        for directory in path.parents:
            if directory == self._root:
                break
            try:
                os.rmdir(directory)
            except OSError:  # not empty, or pruned by someone else: either way nothing is left to do
                break

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        """Turn an OSError of the block into the typed error for this operation and key."""
        try:
            yield
            if not self._met:
                self._check_root()
        except OSError as error:
            if error.errno in _MISSING:
                self._check_root()
            if operation.startswith("get") and error.errno in _MISSING:
                raise ObjectMissing(f"{operation} {self.url}/{key}: there is no such object") from error
            kind, hint = _ERRORS.get(error.errno or 0, _OTHER)
            raise kind(f"{operation} {self.url}/{key}: {error.strerror or error}", hint=hint) from error

    def _check_root(self) -> None:
        """Raises AccessDenied if the root is not there, and was before or is for others to make."""
        if self._root.is_dir():
            self._met = True
        elif self._met or not self._make:
            raise AccessDenied(
                f"{self.url} is not there{' any more' if self._met else ''}",
                hint="check what is mounted there: a folder that is gone is never made anew"
                if self._met
                else "the first publisher makes this folder; if one has run, check the path and what is mounted there",
            )

    @contextmanager
    def _open(self, key: str) -> Iterator[int]:
        """A descriptor of the object's file. Raises OSError, ENOENT for anything but a regular file."""
        path = self._path(key)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not block the reader
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            # NFS clients remember for up to a minute that a name was not there; opening its directory makes them ask.
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            file = os.open(path, flags)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _temporary(self, path: Path, data: Buffer) -> Iterator[Path]:
        """A flushed temporary holding `data` beside `path`; gone afterwards."""
        temporary = path.with_name(TEMPORARY + uuid4().hex)
        file = self._create(temporary)
        try:
            try:
                view = memoryview(data).cast("B")
                while view:
                    view = view[os.write(file, view) :]
                os.fsync(file)
            finally:
                os.close(file)
            yield temporary
        finally:
            with suppress(FileNotFoundError):  # a rename has taken it
                os.unlink(temporary)

    def _create(self, path: Path) -> int:
        """A descriptor of the new file `path`, with its directory, which a delete elsewhere may prune at any moment."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(10):
            with suppress(FileNotFoundError):
                return os.open(path, flags, 0o666)
            with suppress(FileNotFoundError):
                self._make_directory(path.parent)
        return os.open(path, flags, 0o666)

    def _make_directory(self, path: Path) -> None:
        """Create `path` and what is missing above it, each one flushed into its parent."""
        if path.is_dir():
            return
        if path == self._root:
            self._check_root()
        self._make_directory(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)
        _sync_directory(path.parent)

    def _link(self, temporary: Path, path: Path) -> bool:
        """Give the temporary its final name if that is free. True if it bears the name afterwards."""
        try:
            os.link(temporary, path)
        except OSError as error:
            # A network file system may repeat a link whose reply was lost; the error then answers our own success.
            with suppress(OSError):
                if os.path.samefile(temporary, path):
                    return True
            if isinstance(error, FileExistsError):
                if path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
                return False
            if error.errno == errno.EPERM:
                raise StoreUnsuitable(
                    f"put_if_absent {path.as_uri()}: the file system refuses hard links",
                    hint="use a file system with hard links",
                ) from error
            raise
        return True

    def _sync(self, directory: Path) -> None:
        """Flush `directory` and its ancestors up to the root, so that the whole path outlives a power loss."""
        while True:
            _sync_directory(directory)
            if directory == self._root:
                return
            directory = directory.parent

    def _entries(self, directory: str) -> Iterable[Entry]:
        try:
            with os.scandir(self._root / directory) as found:
                entries = list(found)
        except (FileNotFoundError, NotADirectoryError):
            self._check_root()
            return []
        return [
            Entry(
                entry.name,
                entry.is_dir(follow_symlinks=False),
                partial(_record, directory + entry.name, entry),
            )
            for entry in entries
        ]


def _record(key: str, entry: os.DirEntry[str]) -> ObjectInfo | None:
    """The record of a listed file; None for anything but a regular file, and for one deleted meanwhile."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return _info(key, status) if stat.S_ISREG(status.st_mode) else None


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, status.st_mtime)


def _read(file: int, start: int, length: int) -> bytes:
    """`length` bytes from `start`. Raises OSError if the file ends before, which no writer of ours causes."""
    parts: list[bytes] = []
    while length:
        part = os.pread(file, length, start)
        if not part:
            raise OSError(errno.EIO, "the file shrank while it was read")
        parts.append(part)
        start += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
