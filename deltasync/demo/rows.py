"""One row of the demo's table: what one version cost, and whether it arrived bit for bit. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

PHASES: Final = ("capture", "encode", "upload", "commit", "detect", "fetch", "prepare", "scatter", "pause")
"""The way of a version: the first four in the publisher's process, the others in the subscriber's. Nothing is generated
during `pause`, of which `scatter` is a part.
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison saw. `problems` has one line per tensor that is not the same, names sorted."""

    tensors: int
    elements: int
    problems: tuple[str, ...]

    @property
    def identical(self) -> bool:
        return self.tensors > 0 and not self.problems

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return cls(raw["tensors"], raw["elements"], tuple(raw["problems"]))


@dataclass(frozen=True, slots=True)
class Row:
    """One version. `loss` and `reward` (0 … 1, of the batch that led to it) are None at version 0.

    `elements` and `dense_bytes`: of all catalog tensors. `changed`: elements stored. `chunk_bytes`: size of all chunks.
    `seconds`: by phase, see PHASES. `model_tensors`: how many have to be compared: names in the trainer's model, tied
    ones counted each, or what an SGLang server keeps them in.
    """

    version: int
    kind: str
    loss: float | None
    reward: float | None
    elements: int
    changed: int
    chunk_bytes: int
    dense_bytes: int
    seconds: Mapping[str, float]
    model_tensors: int
    comparison: Comparison

    @property
    def changed_percent(self) -> float:
        return 100 * self.changed / self.elements

    @property
    def times_smaller(self) -> float:
        """Than all tensors stored dense and uncompressed; infinite for a version without chunks."""
        return self.dense_bytes / self.chunk_bytes if self.chunk_bytes else float("inf")

    @property
    def identical(self) -> bool:
        """True only if every tensor of the model was compared, and not one bit differed."""
        return self.comparison.identical and self.comparison.tensors == self.model_tensors

    def to_json(self) -> dict[str, Any]:
        computed = {
            "changed_percent": self.changed_percent,
            "times_smaller": self.times_smaller if self.chunk_bytes else None,
            "identical": self.identical,
        }
        return asdict(self) | {"seconds": dict(self.seconds)} | computed


def all_identical(rows: list[Row], versions: int) -> bool:
    """The demo's verdict: a row for the anchor and for each of `versions` updates, each bit-identical."""
    return len(rows) == versions + 1 and all(row.identical for row in rows)
