"""The server that a rank lives in, as far as the rank needs it: `plugin.Server` in SGLang."""

from typing import Any, Protocol

from torch import nn

Ack = dict[str, Any]
"""One rank's acknowledgement of a request; also the request itself: JSON objects."""


class Host(Protocol):
    """What a rank needs of the server it lives in."""

    rank: int
    """Number of this rank over all replicas, from 0."""
    size: int

    @property
    def model(self) -> nn.Module: ...

    def describe(self) -> Ack:
        """What the daemon should know of the server: versions, topology."""

    def refusals(self) -> list[str]:
        """Why this server cannot be updated; empty if it can."""

    def vote(self, ack: Ack) -> list[Ack]:
        """The acknowledgements of all ranks that get the same requests in the same order."""

    def released(self) -> list[str]:
        """What somebody has given back to the device for now ("kv_cache", "weights", …): nobody may use it."""

    def idle(self) -> bool:
        """Whether no request holds anything computed from the weights, or will until generation continues."""

    def stop_batches(self) -> None:
        """Take back what runs, and let no batch run until generation is continued."""

    def disown(self) -> Ack:
        """The weights are no version any more: tell running requests."""

    def wrote(self, version: str) -> None:
        """The weights are `version` now: tell running requests."""

    def drop_cache(self) -> None:
        """Forget what was computed from the weights; the server is idle. Raises if it cannot be forgotten."""
