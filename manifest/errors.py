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
    usual_hint = "`deltasync store verify URL` names all that is damaged; a new anchor leads around it"


class Untrusted(ManifestInvalid):
    kind = "untrusted"
    usual_hint = (
        "see security.md: the publisher signs with another key or none, or somebody else can write here"
    )


class ChainError(DeltasyncError):
    kind = "chain"
    action = Action.RESEED
    usual_hint = "publish an anchor, from which readers start again: publisher.publish(anchor=True)"


class ForeignStream(ChainError):
    kind = "foreign_stream"
    action = Action.FATAL
    usual_hint = "give each stream a prefix of its own"


class BaseMissing(DeltasyncError):
    kind = "base_missing"
    action = Action.RESEED
    usual_hint = "name the folder that the run started from as base_checkpoint"


class CommitUnknown(DeltasyncError):
    kind = "commit_unknown"
    action = Action.RETRY
    usual_hint = "nothing is lost: the next publish begins by reading that version"


class Fenced(DeltasyncError):
    kind = "fenced"
    action = Action.FATAL
    usual_hint = "exactly one trainer may publish a stream; starting one takes it over"


class LocalDiskError(DeltasyncError):
    kind = "local_disk"
    usual_hint = "check the folder's permissions and free space, or name another one"
