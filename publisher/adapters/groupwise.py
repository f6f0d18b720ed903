"""What DeepSpeed's ZeRO optimizers have in common: the inner one steps a flat tensor per group, one after the other."""

from collections.abc import Iterable
from typing import Final

import torch
from torch.optim import Optimizer

from publisher.adapters.plain import PlainAdapter
from publisher.errors import OptimizerRefused

SUPPORTED: Final = "docs/trainers.md lists what is supported"
REPORT: Final = "this layout is not known here: please report it with DeepSpeed's version and configuration"


class GroupwiseAdapter(PlainAdapter):
    """A step is over when the first group is stepped again."""

    sharable = False

    _since: frozenset[int] = frozenset()
    """What has been stepped since the step began, by key."""

    def check_belongs(self, trained: Iterable[torch.Tensor]) -> None:
        """`trained`: what has masters. Raises OptimizerRefused if nothing of it is in the model."""
        known = {id(parameter) for parameter in trained}
        if known.isdisjoint(map(id, self._selection.named().values())):
            raise OptimizerRefused(
                "no parameter of the model is in the optimizer: there would never be a change to publish",
                hint="give the optimizer and the engine that one deepspeed.initialize returned",
            )

    def begins_step(self, optimizer: Optimizer) -> bool:
        """See `Adapter`."""
        keys = {key for key, _ in self.stepped(optimizer)}
        begins = not self._since or not self._since.isdisjoint(keys)
        self._since = frozenset(keys) if begins else self._since | keys
        return begins
