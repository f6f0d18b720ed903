"""What DeepSpeed's ZeRO optimizers have in common: the inner one steps a flat tensor per group, one after the other."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch.optim import Optimizer

from publisher.adapters.plain import PlainAdapter
from publisher.errors import OptimizerRefused

SUPPORTED: Final = "docs/trainers.md lists what is supported"
REPORT: Final = "this layout is not known here: please report it with DeepSpeed's version and configuration"


class GroupwiseAdapter(PlainAdapter, ABC):
    """A step is over when the first group is stepped again."""

    sharable = False

    _since: frozenset[int] = frozenset()
    """What has been stepped since the step began, by key."""

    _homes: tuple[int, ...] = ()

    @abstractmethod
    def buffers(self) -> Sequence[torch.Tensor]:
        """The flat buffers that this rank's pieces lie in, as they are now."""

    def look(self) -> None:
        """Remember where they are."""
        self._homes = self._addresses()

    def moved(self) -> bool:
        """See `Adapter`: engine.offload_states takes the buffers away, and engine.reload_states makes others."""
        return self._homes != self._addresses()

    def _addresses(self) -> tuple[int, ...]:
        return tuple(buffer.data_ptr() for buffer in self.buffers())

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
