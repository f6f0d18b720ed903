"""What the ranks of one trainer tell each other at attach, so that none waits for one that has given up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import distributed

from chunkstore.errors import ConfigError, DeltasyncError
from manifest.catalog import Catalog
from publisher.errors import MappingMismatch
from publisher.group import Writer

T = TypeVar("T")

_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that attach together: the writers, who are all of `writer`'s process group.

    Without a writer this process is alone; writers without a group cannot tell each other anything, and each acts as if
    it was. Raises ConfigError if `writer` is not this process's place in its group. All methods are collective.
    """

    writer: Writer | None = None

    def __post_init__(self) -> None:
        if self.writer is None or self.writer.group is None:
            return
        group = self.writer.group
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        if (self.writer.rank, self.writer.world_size) != (rank, size):
            raise ConfigError(
                f"writer {self.writer.rank} of {self.writer.world_size} is rank {rank} of {size} in its process group",
                hint="leave `writer` out, or make it with deltasync.Writer.of_process_group()",
            )

    @property
    def rank(self) -> int:
        return 0 if self.writer is None else self.writer.rank

    @property
    def size(self) -> int:
        return 1 if self.writer is None else self.writer.world_size

    @property
    def connected(self) -> bool:
        """Whether they can tell each other anything."""
        return self.writer is not None and self.writer.group is not None

    def check_company(self) -> None:
        """Raises ConfigError if other ranks may hold copies, and this process cannot compare any with theirs."""
        size = max(self.size, distributed.get_world_size() if distributed.is_initialized() else 1)
        if size > 1 and not self.connected:
            raise ConfigError(
                f"there are {size} ranks, but this one attached alone, or in no process group: it has nobody to "
                "compare copies with",
                hint="attach on all ranks with writer=deltasync.Writer.of_process_group()",
            )

    def told(self, mine: Any) -> list[Any]:
        """What every rank says; of ranks that are not connected, what this one does."""
        if self.writer is None or self.writer.group is None:
            return [mine]
        told: list[Any] = [None] * self.size
        distributed.all_gather_object(told, mine, group=self.writer.group)
        return told

    def together(self, read: Callable[[], T]) -> T:
        """What `read` returns. What one rank refuses in it, all refuse: the others would wait for it."""
        try:
            found = read()
        except Exception as error:  # also a defect
            self.told(_Refusal.of(error))
            raise
        for rank, refusal in enumerate(self.told(None)):
            if refusal is not None:
                raise refusal.of_rank(rank)
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
                if found != expected and rank == self.rank:
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


ALONE: Final = Ranks()


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An error on its way to the other ranks."""

    kind: type[DeltasyncError]
    message: str

    @classmethod
    def of(cls, error: Exception) -> "_Refusal":
        kind = type(error) if isinstance(error, DeltasyncError) else MappingMismatch
        return cls(kind, str(error) or type(error).__name__)

    def of_rank(self, rank: int) -> DeltasyncError:
        """The same on a rank that would go on."""
        return self.kind(f"rank {rank} refuses: {self.message}", hint="its own log says more")


def _form(one: tuple[str, object] | None) -> str:
    return "missing" if one is None else " ".join(map(str, one))
