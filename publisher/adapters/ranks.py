"""What the ranks of one trainer tell each other at attach, so that none waits for one that has given up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import distributed

from chunkstore.errors import ConfigError
from manifest.catalog import Catalog
from publisher.errors import MappingMismatch
from publisher.group import Writer

T = TypeVar("T")

_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that hold a model together: the writers, who are all of `writer`'s process group.

    Raises ConfigError if `writer` is not this process's place in it. All methods are collective.
    """

    writer: Writer

    def __post_init__(self) -> None:
        group = self.writer.group
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        if (self.writer.rank, self.writer.world_size) != (rank, size):
            raise ConfigError(
                f"writer {self.writer.rank} of {self.writer.world_size} is rank {rank} of {size} in its process group",
                hint="leave `writer` out, or make it with deltasync.Writer.of_process_group()",
            )

    @property
    def size(self) -> int:
        return self.writer.world_size

    def told(self, mine: Any) -> list[Any]:
        """What every rank says."""
        told: list[Any] = [None] * self.size
        distributed.all_gather_object(told, mine, group=self.writer.group)
        return told

    def together(self, read: Callable[[], T]) -> T:
        """What `read` returns. What one rank refuses in it, all refuse: the others would wait for it."""
        try:
            found = read()
        except Exception as error:  # also a defect
            self.told(str(error) or type(error).__name__)
            raise
        for rank, problem in enumerate(self.told(None)):
            if problem is not None:
                raise MappingMismatch(f"rank {rank} refuses: {problem}", hint="its own log says more")
        return found

    def problems(self, own: list[str], held: Mapping[str, int]) -> list[str]:
        """What is wrong on any rank: `own` of each, and copies that differ.

        `held`: digests by tensor name and place, the name first; those of one place must be the same on all ranks.
        """
        mine = list(own)
        first: dict[str, tuple[int, int]] = {}
        for rank, digests in enumerate(self.told(held)):
            for place, found in digests.items():
                other, expected = first.setdefault(place, (rank, found))
                if found != expected and rank == self.writer.rank:
                    mine.append(f"{place.partition(' ')[0]} differs from what rank {other} holds of it")
        return [
            f"rank {rank}: {problem}"
            for rank, problems in enumerate(self.told(mine[:_SHOWN]))
            for problem in problems
        ]

    def strange(self, catalog: Catalog) -> list[str]:
        """What of the ranks' catalogs is not the same on all. To be asked before anything is gathered by name."""
        if len({*self.told(catalog.hash)}) == 1:
            return []
        tensors = {spec.name: (spec.dtype, spec.shape) for spec in catalog.tensors}
        first, *others = self.told(tensors | {alias: ("as", name) for alias, name in catalog.aliases.items()})
        out = []
        for rank, named in enumerate(others, 1):
            names = sorted(name for name in first.keys() | named.keys() if first.get(name) != named.get(name))
            out += [
                f"{n} is {_form(named.get(n))} on rank {rank}, {_form(first.get(n))} on rank 0" for n in names
            ]
        return out[:_SHOWN]


def _form(one: tuple[str, object] | None) -> str:
    return "missing" if one is None else " ".join(map(str, one))
