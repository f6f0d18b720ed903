"""What a rank keeps of an order until its apply is on the record: places, old bits and new bits."""

from dataclasses import dataclass, field
from typing import Final

from chunkstore.regions import Indices
from subscriber.sglang import live
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
    kept: dict[str, list[list[live.Block]]] = field(default_factory=dict)

    def blocks(self, number: int, kind: str) -> list[live.Block]:
        """Piece `number` with its `old` or `new` bits, from memory if the order was kept there. Raises StagedLost."""
        kept = self.kept.get(kind)
        return self._cut(number, kind, self.targets[number]) if kept is None else kept[number]

    def keep(self, *kinds: str) -> None:
        """Read all pieces with these bits now: into memory if they are small, else only to check them."""
        small = self.files.nbytes <= _IN_MEMORY
        kept: dict[str, list[list[live.Block]]] = {kind: [] for kind in kinds}
        for number, targets in enumerate(self.targets):
            for kind in kinds:
                blocks = self._cut(number, kind, targets)
                if small:
                    kept[kind].append(blocks)
        self.kept = kept if small else {}

    def _cut(self, number: int, kind: str, targets: Indices) -> list[live.Block]:
        piece = self.files.order.pieces[number]
        bits = {"old": self.old, "new": self.new}[kind]
        assert bits is not None, "opened before it is asked for"
        return live.cut(piece, targets, bits[number], on_host=self.traced.live.on_host)
