"""The interface of an object store, and the rules for keys.

A Store is rooted at one stream's prefix; keys are relative to it. What a store must offer (docs/FORMAT.md):
put-if-absent of one small object with exactly one winner, read-after-write, strongly consistent get.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from chunkstore.errors import InvalidKey

Buffer = bytes | bytearray | memoryview

MAX_KEY: Final = 512
_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object: `key`, `size` in bytes, `modified` in Unix seconds by the store's own clock."""

    key: str
    size: int
    modified: float


class Store(ABC):
    """Bytes by key. Every method is safe to call from several threads.

    All methods raise `InvalidKey` for a key that `check_key` refuses, `StoreUnavailable` for a passing fault,
    `AccessDenied` and `StoreFull` where the store says so. Messages name the operation and the full URL of the object.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Where this store is rooted, for messages; never holds credentials."""

    @abstractmethod
    def get(self, key: str, *, limit: int) -> bytes:
        """The whole object. Raises ObjectMissing; LimitExceeded if it is larger than `limit` bytes."""

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`. Raises ObjectMissing; CorruptObject if the object ends before."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo | None:
        """The object's record, or None if there is none."""

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write the object, durable on return; an existing one is replaced atomically."""

    @abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Create the object if the key is free: True if this call created it, False if the key is taken.

        Exactly one of any number of racing callers gets True. False may be the answer to one's own earlier try
        whose reply was lost. Never retried in here: on StoreUnavailable the outcome is unknown.
        """

    @abstractmethod
    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` and is greater than `after`, in ascending key order, lazily."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; no error if there is none."""

    @abstractmethod
    def temporaries(self) -> Iterator[ObjectInfo]:
        """What writers have begun and not finished, dead or alive, by names that are no keys; no other call sees it.

        A name that ends in `/` is an empty directory. Nothing for a store that keeps nothing of half an object.
        """

    @abstractmethod
    def delete_temporary(self, name: str) -> None:
        """Remove what `temporaries` named; no error if it is gone. A writer still at it fails. Raises InvalidKey."""


def is_key(key: str) -> bool:
    """Whether `check_key` accepts `key`. Listings leave out every object whose name is not a key."""
    return 0 < len(key) <= MAX_KEY and all(_SEGMENT.fullmatch(part) for part in key.split("/"))


def check_key(key: str) -> str:
    """Return `key` if it may be used in a store, else raise InvalidKey.

    A key is 1 to 512 characters: segments of letters, digits, `.`, `_`, `-`, joined by `/`, none empty and none
    starting with a dot, so that no key can escape the prefix or meet a temporary file.
    """
    if not is_key(key):
        raise InvalidKey(
            f"object key {key!r:.200} is not allowed",
            hint="keys are up to 512 letters, digits, '.', '_', '-' in non-empty segments that do not start with a dot",
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is empty or begins some key, else raise InvalidKey; so that no listing leaves the store."""
    if prefix:
        check_key(prefix + "x" if prefix.endswith("/") else prefix)
    return prefix
