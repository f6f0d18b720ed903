"""The one tree of typed errors. Every error says what happened, to which object, and what to do next.

DeltasyncError
├── StoreError                      something about an object store
│   ├── StoreUnavailable            network, 5xx, throttling, timeout: try again (retry)
│   │   └── CredentialsExpired      the next call renews them; nothing was read or written (retry)
│   ├── ObjectMissing               a named object is not there (reseed)
│   ├── AccessDenied                credentials or permissions (retry: they may be renewed)
│   ├── StoreFull                   no space, quota (retry)
│   ├── StoreUnsuitable             the store does not offer what the protocol needs (fatal)
│   └── InvalidKey                  a key or URL that is not allowed (fatal)
├── CorruptObject                   bytes differ from what their hash, length or format promises (reseed)
├── FormatUnsupported               a format version or encoding that this release does not know (fatal)
├── LimitExceeded                   a declared size is over a limit; nothing was allocated (fatal)
└── ConfigError                     wrong key or value in a config file; names its path (fatal)

Other packages add their own branches below DeltasyncError, each in its `errors.py`.
"""

from enum import StrEnum
from typing import ClassVar


class Action(StrEnum):
    """What the handler of an error should do."""

    RETRY = "retry"  # the same call may succeed later; nothing was changed
    RESEED = "reseed"  # do not retry this object or path: re-plan from an anchor
    FATAL = "fatal"  # a person has to change something


class DeltasyncError(Exception):
    """Base of every error raised on purpose.

    `kind` is a stable snake_case name used in metrics, logs and docs/troubleshooting.md; `hint` says what to do next.
    """

    kind: ClassVar[str] = "error"
    action: ClassVar[Action] = Action.FATAL

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class StoreError(DeltasyncError):
    kind = "store"
    action = Action.RETRY


class StoreUnavailable(StoreError):
    kind = "store_unavailable"


class CredentialsExpired(StoreUnavailable):
    kind = "credentials_expired"


class ObjectMissing(StoreError):
    kind = "object_missing"
    action = Action.RESEED


class AccessDenied(StoreError):
    kind = "access_denied"


class StoreFull(StoreError):
    kind = "store_full"


class StoreUnsuitable(StoreError):
    kind = "store_unsuitable"
    action = Action.FATAL


class InvalidKey(StoreError):
    kind = "invalid_key"
    action = Action.FATAL


class CorruptObject(DeltasyncError):
    kind = "corrupt_object"
    action = Action.RESEED


class FormatUnsupported(DeltasyncError):
    kind = "format_unsupported"


class LimitExceeded(DeltasyncError):
    kind = "limit_exceeded"


class ConfigError(DeltasyncError):
    kind = "config"
