"""What can go wrong with the demo itself."""

from chunkstore.errors import DeltasyncError


class DemoFailed(DeltasyncError):
    """A process of the demo died, hung or answered with an error, or the demo model is not installed."""

    kind = "demo"
    usual_hint = "the logs of all processes are kept with --keep DIR"
