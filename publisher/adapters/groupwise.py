"""What DeepSpeed's ZeRO optimizers have in common: the inner one steps a flat tensor per group, one after the other."""

from typing import Final

from torch.optim import Optimizer

from publisher.adapters.plain import PlainAdapter

SUPPORTED: Final = "docs/trainers.md lists what is supported"
REPORT: Final = "this layout is not known here: please report it with DeepSpeed's version and configuration"


class GroupwiseAdapter(PlainAdapter):
    """A step is over when the first group is stepped again."""

    sharable = False

    _since: frozenset[int] = frozenset()
    """What has been stepped since the step began, by key."""

    def begins_step(self, optimizer: Optimizer) -> bool:
        """See `Adapter`."""
        keys = {key for key, _ in self.stepped(optimizer)}
        begins = not self._since or not self._since.isdisjoint(keys)
        self._since = frozenset(keys) if begins else self._since | keys
        return begins
