"""Errors of the trainer side.

DeltasyncError
├── OptimizerRefused     an optimizer or parameter whose changes cannot be found as configured (fatal)
├── MappingMismatch      the model does not match the base checkpoint or the stream's catalog (fatal)
├── PublisherStopped     publish() after close(), or after a fatal error that was already reported (fatal)
├── SidecarUnavailable   the publisher process is not there, has died or does not answer; nothing is lost (retry)
├── SidecarBusy          the publisher process still uploads the version before; nothing is lost (retry)
├── CaptureLost          the weights moved while they were read, or it took too long; nothing is lost (retry)
├── WritersDisagree      parts of one version that do not fit together: a gap, an overlap, another step (fatal)
├── WriterMissing        another writer of this stream did not call or answer in time; nothing is lost (retry)
├── WriterReplaced       another process answers in this writer's place (fatal)
├── AttemptAbandoned     the writers did not get this version together; the next one carries the changes (retry)
├── SpoolInvalid         a file or message in the spool that the other side cannot have meant (fatal)
└── CompactionLate       an anchor was not built within half of garbage collection's grace period (retry)
"""

from chunkstore.errors import Action, DeltasyncError


class OptimizerRefused(DeltasyncError):
    kind = "optimizer_refused"


class MappingMismatch(DeltasyncError):
    kind = "mapping"


class PublisherStopped(DeltasyncError):
    kind = "publisher_stopped"


class SidecarUnavailable(DeltasyncError):
    kind = "sidecar_unavailable"
    action = Action.RETRY


class SidecarBusy(DeltasyncError):
    kind = "sidecar_busy"
    action = Action.RETRY


class CaptureLost(DeltasyncError):
    kind = "capture_lost"
    action = Action.RETRY


class WritersDisagree(DeltasyncError):
    kind = "writers_disagree"


class WriterMissing(DeltasyncError):
    kind = "writer_missing"
    action = Action.RETRY


class WriterReplaced(DeltasyncError):
    kind = "writer_replaced"


class AttemptAbandoned(DeltasyncError):
    kind = "attempt_abandoned"
    action = Action.RETRY


class SpoolInvalid(DeltasyncError):
    kind = "spool_invalid"


class CompactionLate(DeltasyncError):
    kind = "compaction_late"
    action = Action.RETRY
