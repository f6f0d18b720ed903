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
    usual_hint = "set detect: snapshot, which accepts any optimizer"


class MappingMismatch(DeltasyncError):
    kind = "mapping"
    usual_hint = "print(deltasync.explain(optimizer, model)) shows what would be published"


class PublisherStopped(DeltasyncError):
    kind = "publisher_stopped"
    usual_hint = "the first error in the log is the cause; attach anew"


class SidecarUnavailable(DeltasyncError):
    kind = "sidecar_unavailable"
    action = Action.RETRY
    usual_hint = "start `deltasync publisher run` with the same file; the next publish carries the changes"


class SidecarBusy(DeltasyncError):
    kind = "sidecar_busy"
    action = Action.RETRY
    usual_hint = "nothing is lost: the next publish carries the changes; publish less often if it stays so"


class CaptureLost(DeltasyncError):
    kind = "capture_lost"
    action = Action.RETRY
    usual_hint = "nothing is lost: the next publish carries the changes"


class WritersDisagree(DeltasyncError):
    kind = "writers_disagree"
    usual_hint = "correct `owned` on the ranks that are named"


class WriterMissing(DeltasyncError):
    kind = "writer_missing"
    action = Action.RETRY
    usual_hint = "look at the logs of the ranks that are missing; the next publish carries the changes"


class WriterReplaced(DeltasyncError):
    kind = "writer_replaced"
    usual_hint = "restart all ranks, with a new `run`"


class AttemptAbandoned(DeltasyncError):
    kind = "attempt_abandoned"
    action = Action.RETRY
    usual_hint = "nothing is lost: the next publish carries the changes"


class SpoolInvalid(DeltasyncError):
    kind = "spool_invalid"
    usual_hint = "use a folder of its own, and the same release of deltasync on both sides"


class CompactionLate(DeltasyncError):
    kind = "compaction_late"
    action = Action.RETRY
    usual_hint = "give a longer grace period, or a faster store or disk"
