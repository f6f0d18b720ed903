"""What a rank keeps of an order until its apply is on the record: places, old bits and new bits."""

from dataclasses import dataclass, field
from typing import Any, Final

from subscriber.sglang.traced import Traced
from subscriber.sglang.wire import RankFiles, Targets, Values

_IN_MEMORY: Final = 1 << 30
"""Orders up to this size, in bytes, are held ready in memory; larger ones are read piece by piece while written."""


@dataclass(slots=True)
class Job:
    """An order at hand, for places of `traced`, which leads to `version`; -1 while that is not known.

    `token`: the count of writes when its old bits were read, None if they were not.
    """

    name: str
    traced: Traced
    files: RankFiles
    targets: Targets
    version: int = -1
    token: int | None = None
    old: Values | None = None
    new: Values | None = None
    cache: dict[str, list[Any]] = field(default_factory=dict)

    def pieces(self, kind: str) -> Any:
        """`targets`, `old` or `new`, from memory if they were small enough to be kept."""
        return self.cache.get(kind) or getattr(self, kind)

    def keep(self, *kinds: str) -> None:
        """Read these arrays now: into memory if they are small, else only to check them."""
        small = self.files.nbytes <= _IN_MEMORY
        for kind in kinds:
            kept = [array for array in getattr(self, kind) if small]
            if small:
                self.cache[kind] = kept
