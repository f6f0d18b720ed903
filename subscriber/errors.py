"""Errors about bringing an engine to a version.

DeltasyncError
└── SubscriberError
    ├── EngineMismatch        the catalog and the engine's tensors do not fit; names all offenders (fatal)
    ├── EngineChanged         somebody else wrote the weights (reseed)
    ├── EngineRestarted       the engine lives another life than the one that was attached (retry)
    ├── EngineFailed          the engine could not read or write its weights, e.g. out of memory (retry)
    │   └── EngineDenied      its key is missing, wrong or cannot be sent (retry: it may be renewed)
    ├── EngineBusy            it could not be written just now, and serves on what it served (retry)
    ├── EngineFault           the engine raised what it should not, a fault of ours or its own (retry)
    ├── EngineNotReady        generation was asked for while no verified version is loaded (retry)
    ├── EngineDrift           the live weights are not those of the version that was applied (reseed)
    ├── VerificationFailed    the update does not lead to the manifest's digests; nothing written (reseed)
    ├── StagedLost            staged values are gone or damaged (reseed)
    ├── StagingFull           the staging directory has too little room (retry)
    ├── StagingUnavailable    a local directory is gone, read-only or damaged (retry)
    └── SubscriberBusy        another subscriber of the same id uses this state or staging directory (fatal)
"""

from chunkstore.errors import Action, DeltasyncError


class SubscriberError(DeltasyncError):
    kind = "subscriber"
    usual_hint = "look at the subscriber's log"


class EngineMismatch(SubscriberError):
    kind = "engine_mismatch"
    usual_hint = "serve the architecture that is trained, in the stream's dtypes"


class EngineChanged(SubscriberError):
    kind = "engine_changed"
    action = Action.RESEED
    usual_hint = "write a served model only through the subscriber"


class EngineRestarted(SubscriberError):
    kind = "engine_restarted"
    action = Action.RETRY
    usual_hint = "nothing to do: it is brought to the newest version"


class EngineFailed(SubscriberError):
    kind = "engine_failed"
    action = Action.RETRY
    usual_hint = "it is tried again; look at the engine's own log and memory"


class EngineBusy(SubscriberError):
    kind = "engine_busy"
    action = Action.RETRY
    usual_hint = "nothing to do: it is tried again soon"


class EngineDenied(EngineFailed):
    kind = "engine_denied"
    usual_hint = "give it the server's key: see docs/sglang.md"


class EngineFault(SubscriberError):
    kind = "engine_fault"
    action = Action.RETRY
    usual_hint = "this should not happen: please report it, with the traceback in the log"


class EngineNotReady(SubscriberError):
    kind = "engine_not_ready"
    action = Action.RETRY
    usual_hint = "wait, or see /status for the reason"


class EngineDrift(SubscriberError):
    kind = "engine_drift"
    action = Action.RESEED
    usual_hint = "an anchor repairs it; find out what else writes to the weights"


class VerificationFailed(SubscriberError):
    kind = "verification_failed"
    action = Action.RESEED
    usual_hint = "a way around it is looked for; the publisher answers with an anchor"


class StagedLost(SubscriberError):
    kind = "staged_lost"
    action = Action.RESEED
    usual_hint = "an anchor repairs it; do not clear the folder while a subscriber runs"


class StagingFull(SubscriberError):
    kind = "staging_full"
    action = Action.RETRY
    usual_hint = "free space there, or set staging_dir to another folder"


class StagingUnavailable(SubscriberError):
    kind = "staging_unavailable"
    action = Action.RETRY
    usual_hint = "let this user write there, or set state_dir (or staging_dir) to another folder"


class SubscriberBusy(SubscriberError):
    kind = "subscriber_busy"
    usual_hint = "give each subscriber an id of its own"


def name_offenders(problems: list[str], limit: int = 50) -> str:
    """One line that names the offenders, at most `limit` of them and a count of the rest."""
    rest = len(problems) - limit
    return "; ".join(problems[:limit]) + (f"; and {rest} more" if rest > 0 else "")
