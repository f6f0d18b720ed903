"""Every error of the project in one place: catch `deltasync.errors.DeltasyncError`, or what you can handle.

The trees are drawn in the modules that define them; docs/troubleshooting.md has a section for each `kind`.
"""

from chunkstore.errors import (
    AccessDenied,
    Action,
    ConfigError,
    CorruptObject,
    DeltasyncError,
    FormatUnsupported,
    InvalidKey,
    LimitExceeded,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from manifest.errors import ChainError, CommitUnknown, Fenced, ForeignStream, ManifestInvalid

__all__ = [
    "AccessDenied",
    "Action",
    "ChainError",
    "CommitUnknown",
    "ConfigError",
    "CorruptObject",
    "DeltasyncError",
    "Fenced",
    "ForeignStream",
    "FormatUnsupported",
    "InvalidKey",
    "LimitExceeded",
    "ManifestInvalid",
    "ObjectMissing",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "StoreUnsuitable",
]
