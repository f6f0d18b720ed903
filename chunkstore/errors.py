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

    `kind` is a stable snake_case name used in metrics, logs and docs/troubleshooting.md; `hint` says what to do next,
    by default the `usual_hint` of the kind.
    """

    kind: ClassVar[str] = "error"
    action: ClassVar[Action] = Action.FATAL
    usual_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.usual_hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class StoreError(DeltasyncError):
    kind = "store"
    action = Action.RETRY
    usual_hint = "check the store's URL, and that it answers"


class StoreUnavailable(StoreError):
    kind = "store_unavailable"
    usual_hint = (
        "check the endpoint and the network; nothing is lost, and the same works once the store answers"
    )


class CredentialsExpired(StoreUnavailable):
    kind = "credentials_expired"
    usual_hint = "if this repeats, check what renews the credentials of this process"


class ObjectMissing(StoreError):
    kind = "object_missing"
    action = Action.RESEED
    usual_hint = (
        "`deltasync store show URL` lists the versions, `deltasync store verify URL` all that is missing"
    )


class AccessDenied(StoreError):
    kind = "access_denied"
    usual_hint = "check the credentials of this process, and what they may do under this prefix"


class StoreFull(StoreError):
    kind = "store_full"
    usual_hint = "free space, or run `deltasync store gc URL`"


class StoreUnsuitable(StoreError):
    kind = "store_unsuitable"
    action = Action.FATAL
    usual_hint = "`deltasync store check URL` says what the store lacks"


class InvalidKey(StoreError):
    kind = "invalid_key"
    action = Action.FATAL
    usual_hint = (
        "keys are letters, digits, '.', '_' and '-' between slashes; nothing else belongs under the prefix"
    )


class CorruptObject(DeltasyncError):
    kind = "corrupt_object"
    action = Action.RESEED
    usual_hint = "`deltasync store verify URL` finds every damaged object; a new anchor leads around it"


class FormatUnsupported(DeltasyncError):
    kind = "format_unsupported"
    usual_hint = "install the release that wrote it, or a newer one: readers before writers"


class LimitExceeded(DeltasyncError):
    kind = "limit_exceeded"
    usual_hint = "the object is foreign or damaged; if deltasync wrote it, please report it"


class ConfigError(DeltasyncError):
    kind = "config"
    usual_hint = "correct the configuration; `deltasync check-config FILE` checks it"
