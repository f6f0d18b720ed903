"""Errors of the trainer side.

DeltasyncError
├── OptimizerRefused     an optimizer or parameter whose changes cannot be found as configured (fatal)
├── MappingMismatch      the model does not match the base checkpoint or the stream's catalog (fatal)
└── PublisherStopped     publish() after close(), or after a fatal error that was already reported (fatal)
"""

from chunkstore.errors import DeltasyncError


class OptimizerRefused(DeltasyncError):
    kind = "optimizer_refused"


class MappingMismatch(DeltasyncError):
    kind = "mapping"


class PublisherStopped(DeltasyncError):
    kind = "publisher_stopped"
