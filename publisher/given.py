"""What attach and explain are given: configuration, base checkpoint and trainer, read by all ranks together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from chunkstore.config import settings_of
from manifest.checkpoint import Checkpoint
from publisher.adapters import ranks_of, recognise
from publisher.adapters.base import Adapter
from publisher.adapters.plain import Masters
from publisher.adapters.ranks import Ranks
from publisher.config import PublisherConfig
from publisher.errors import MappingMismatch
from publisher.group import Writer
from publisher.watch import WatchPlan, plan_watch


@dataclass(frozen=True)
class Given:
    """`masters`: how many. `plan`: what this process would publish, if none of `adapter.problems` is in the way."""

    settings: PublisherConfig
    checkpoint: Checkpoint | None
    masters: int
    adapter: Adapter
    ranks: Ranks
    plan: WatchPlan

    @property
    def writer(self) -> Writer | None:
        """This process's place among the writers; None: it has the stream for itself."""
        writer = self.ranks.writer
        return None if writer is not None and writer.world_size == 1 and writer.owned is None else writer


def read_given(
    optimizer: Any,
    model: nn.Module | Sequence[nn.Module],
    config: PublisherConfig | Mapping[str, Any] | Path | str,
    masters: Masters,
    writer: Writer | None,
) -> Given:
    """What `Publisher.attach` is called with. What one rank cannot read or refuses, all refuse.

    Raises ConfigError, OptimizerRefused, MappingMismatch.
    """
    ranks = ranks_of(optimizer, model, writer)

    def read() -> tuple[PublisherConfig, Checkpoint | None, int, Adapter]:
        settings = settings_of(config, PublisherConfig, source="the config given to Publisher.attach")
        pairs = list(masters)
        base = settings.base_checkpoint
        checkpoint = None if base is None else Checkpoint.open(base, MappingMismatch)
        return (
            settings,
            checkpoint,
            len(pairs),
            recognise(optimizer, model, pairs, ranks, checkpoint, settings.lora),
        )

    settings, checkpoint, count, adapter = ranks.together(read)
    plan = plan_watch(adapter, checkpoint, settings, ranks.rank)
    return Given(settings, checkpoint, count, adapter, ranks, plan)
