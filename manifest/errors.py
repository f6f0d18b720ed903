"""Errors about versions, chains and commits.

DeltasyncError
├── ManifestInvalid       a manifest or catalog that does not parse or contradicts itself (reseed)
│   └── Untrusted         not signed by a trusted key, for this stream, as it is (reseed)
├── ChainError            versions that do not fit together: gap, cycle, wrong parent or base (reseed)
│   └── ForeignStream     a manifest of another stream (fatal)
├── BaseMissing           the checkpoint that version 0 refers to is not here, or is another one (reseed)
├── CommitUnknown         it is not known whether a commit happened; nothing was forgotten (retry)
├── Fenced                another publisher has taken the stream over (fatal)
└── LocalDiskError        files cannot be written where they were asked for; nothing is left behind (fatal)
"""

from chunkstore.errors import Action, DeltasyncError


class ManifestInvalid(DeltasyncError):
    kind = "manifest_invalid"
    action = Action.RESEED


class Untrusted(ManifestInvalid):
    kind = "untrusted"


class ChainError(DeltasyncError):
    kind = "chain"
    action = Action.RESEED


class ForeignStream(ChainError):
    kind = "foreign_stream"
    action = Action.FATAL


class BaseMissing(DeltasyncError):
    kind = "base_missing"
    action = Action.RESEED


class CommitUnknown(DeltasyncError):
    kind = "commit_unknown"
    action = Action.RETRY


class Fenced(DeltasyncError):
    kind = "fenced"
    action = Action.FATAL


class LocalDiskError(DeltasyncError):
    kind = "local_disk"
