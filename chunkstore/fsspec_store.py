"""A read-only store behind any other fsspec URL.

Read-only because fsspec promises no put-if-absent: its exclusive creation asks first and writes afterwards.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn

import fsspec

from chunkstore.errors import (
    AccessDenied,
    ConfigError,
    CorruptObject,
    LimitExceeded,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
    StoreUnsuitable,
)
from chunkstore.store import Buffer, ObjectInfo, Store, check_key
from chunkstore.walk import Entry, walk

_MODIFIED: Final = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class FsspecStore(Store):
    """Objects below an fsspec URL, read with the file system's own caching of listings switched off.

    `options` go to the file system. Raises ConfigError if fsspec knows no such scheme or lacks its package.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._url = _without_secrets(url)
        self._secret = self._url != url.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True, **options
            )
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{self._url}: {error}", hint="check the scheme, and install the fsspec package for it"
            ) from error
        self._root = str(root).rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def get(self, key: str, *, limit: int) -> bytes:
        with self._errors("get", key):
            size = int(self._files.info(self._path(key))["size"])
            if size > limit:
                raise LimitExceeded(f"get {self.url}/{key}: {size} bytes, more than the limit of {limit}")
            data = bytes(self._files.cat_file(self._path(key)))
        if len(data) != size:
            raise StoreUnavailable(f"get {self.url}/{key}: the body ended after {len(data)} of {size} bytes")
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._errors("get_range", key):
            size = int(self._files.info(self._path(key))["size"])
            if start + length > size:
                raise CorruptObject(
                    f"get_range {self.url}/{key}: the object ends at byte {size}, before byte {start + length}"
                )
            if length == 0:
                return b""
            data = bytes(self._files.cat_file(self._path(key), start=start, end=start + length))
        if len(data) != length:
            raise StoreUnavailable(
                f"get_range {self.url}/{key}: the body ended after {len(data)} of {length} bytes"
            )
        return data

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors("head", key):
                info = self._files.info(self._path(key))
        except ObjectMissing:
            return None
        return _object(key, info)

    def put(self, key: str, data: Buffer) -> NoReturn:
        self._refuse("put", key)

    def put_if_absent(self, key: str, data: Buffer) -> NoReturn:
        self._refuse("put_if_absent", key)

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        with self._errors("list", prefix):
            yield from walk(self._entries, prefix, after)

    def delete(self, key: str) -> NoReturn:
        self._refuse("delete", key)

    def temporaries(self) -> Iterator[ObjectInfo]:
        return iter(())

    def delete_temporary(self, name: str) -> NoReturn:
        self._refuse("delete_temporary", name)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _entries(self, directory: str) -> Iterable[Entry]:
        path = f"{self._root}/{directory}".rstrip("/")
        self._files.invalidate_cache()
        try:
            found = self._files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        for info in found:
            found_path = str(info["name"]).rstrip("/")
            if found_path == path:
                continue  # a directory's own marker, or a file where a directory was asked for
            name = found_path.rpartition("/")[2]
            yield Entry(name, info["type"] == "directory", partial(_object, directory + name, info))

    @contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        """Turn what the file system raises in the block into the typed error for this operation and key."""
        what = f"{operation} {self.url}/{key}"
        try:
            yield
        except (StoreError, LimitExceeded, CorruptObject):
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            if _unreachable(error.__cause__):
                raise StoreUnavailable(f"{what}: {self._told(error.__cause__)}") from error
            raise ObjectMissing(f"{what}: there is no such object") from error
        except PermissionError as error:
            raise AccessDenied(
                f"{what}: {self._told(error)}", hint="check the credentials of this process"
            ) from error
        except Exception as error:  # each file system raises what its client library raises
            raise StoreUnavailable(f"{what}: {self._told(error)}") from error

    def _told(self, error: BaseException | None) -> str:
        """What a message may say of `error`: libraries put the whole URL in theirs, with any credentials in it."""
        return type(error).__name__ if self._secret else f"{type(error).__name__}: {error}"

    def _refuse(self, operation: str, key: str) -> NoReturn:
        raise StoreUnsuitable(
            f"{operation} {self.url}/{key}: this kind of store is only for reading",
            hint="write to s3://bucket/prefix or to a POSIX directory, which offer put-if-absent",
        )


def _object(key: str, info: dict[str, Any]) -> ObjectInfo | None:
    return ObjectInfo(key, int(info["size"]), modified(info)) if info["type"] == "file" else None


def modified(info: dict[str, Any]) -> float:
    """Unix seconds; 0 where the file system tells no time."""
    value = next((info[name] for name in _MODIFIED if info.get(name) is not None), 0.0)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return 0.0
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return float(value)


def _unreachable(cause: BaseException | None) -> bool:
    """Whether "not found" hides another failure. fsspec's HTTP file system says it of everything that goes wrong."""
    if isinstance(cause, FileNotFoundError) or getattr(cause, "status", 0) == 404:
        return False
    return isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp.")


def _without_secrets(url: str) -> str:
    """`url` without user, password, query and fragment."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{re.split('[?#]', path)[0]}".rstrip("/")
