"""Every error of the project in one place: catch `deltasync.errors.DeltasyncError`, or what you can handle.

The trees are drawn in the modules that define them; docs/troubleshooting.md has a section for each `kind`.
"""

from chunkstore.errors import (
    AccessDenied,
    Action,
    ConfigError,
    CorruptObject,
    CredentialsExpired,
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
from deltasync.demo.errors import (
    DemoFailed,
)
from manifest.errors import (
    ChainError,
    CommitUnknown,
    Fenced,
    ForeignStream,
    LocalDiskError,
    ManifestInvalid,
)
from publisher.errors import (
    CaptureLost,
    MappingMismatch,
    OptimizerRefused,
    PublisherStopped,
    SidecarBusy,
    SidecarUnavailable,
    SpoolInvalid,
)
from subscriber.errors import (
    EngineChanged,
    EngineDrift,
    EngineFailed,
    EngineMismatch,
    EngineNotReady,
    StagedLost,
    StagingFull,
    SubscriberBusy,
    SubscriberError,
    VerificationFailed,
)

__all__ = [
    "AccessDenied",
    "Action",
    "CaptureLost",
    "ChainError",
    "CommitUnknown",
    "ConfigError",
    "CorruptObject",
    "CredentialsExpired",
    "DeltasyncError",
    "DemoFailed",
    "EngineChanged",
    "EngineDrift",
    "EngineFailed",
    "EngineMismatch",
    "EngineNotReady",
    "Fenced",
    "ForeignStream",
    "FormatUnsupported",
    "InvalidKey",
    "LimitExceeded",
    "LocalDiskError",
    "ManifestInvalid",
    "MappingMismatch",
    "ObjectMissing",
    "OptimizerRefused",
    "PublisherStopped",
    "SidecarBusy",
    "SidecarUnavailable",
    "SpoolInvalid",
    "StagedLost",
    "StagingFull",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "StoreUnsuitable",
    "SubscriberBusy",
    "SubscriberError",
    "VerificationFailed",
]
