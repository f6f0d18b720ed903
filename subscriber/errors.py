"""Errors about bringing an engine to a version.

DeltasyncError
└── SubscriberError
    ├── EngineMismatch        the catalog and the engine's tensors do not fit; names all offenders (fatal)
    ├── EngineChanged         somebody else wrote the weights (reseed)
    ├── EngineRestarted       the engine lives another life than the one that was attached (retry)
    ├── EngineFailed          the engine could not read or write its weights, e.g. out of memory (retry)
    ├── EngineNotReady        generation was asked for while no verified version is loaded (retry)
    ├── EngineDrift           the live weights are not those of the version that was applied (reseed)
    ├── VerificationFailed    the update does not lead to the manifest's digests; nothing written (reseed)
    ├── StagedLost            staged values are gone or damaged (reseed)
    ├── StagingFull           the staging directory has too little room (retry)
    ├── StagingUnavailable    a local directory is gone, read-only or damaged (retry)
    └── SubscriberBusy        another subscriber of the same id runs on this state directory (fatal)
"""

from chunkstore.errors import Action, DeltasyncError


class SubscriberError(DeltasyncError):
    kind = "subscriber"


class EngineMismatch(SubscriberError):
    kind = "engine_mismatch"


class EngineChanged(SubscriberError):
    kind = "engine_changed"
    action = Action.RESEED


class EngineRestarted(SubscriberError):
    kind = "engine_restarted"
    action = Action.RETRY


class EngineFailed(SubscriberError):
    kind = "engine_failed"
    action = Action.RETRY


class EngineBusy(SubscriberError):
    kind = "engine_busy"
    action = Action.RETRY


class EngineNotReady(SubscriberError):
    kind = "engine_not_ready"
    action = Action.RETRY


class EngineDrift(SubscriberError):
    kind = "engine_drift"
    action = Action.RESEED


class VerificationFailed(SubscriberError):
    kind = "verification_failed"
    action = Action.RESEED


class StagedLost(SubscriberError):
    kind = "staged_lost"
    action = Action.RESEED


class StagingFull(SubscriberError):
    kind = "staging_full"
    action = Action.RETRY


class StagingUnavailable(SubscriberError):
    kind = "staging_unavailable"
    action = Action.RETRY


class SubscriberBusy(SubscriberError):
    kind = "subscriber_busy"


def name_offenders(problems: list[str], limit: int = 50) -> str:
    """One line that names the offenders, at most `limit` of them and a count of the rest."""
    rest = len(problems) - limit
    return "; ".join(problems[:limit]) + (f"; and {rest} more" if rest > 0 else "")
