"""What a kind of trainer has to tell the publisher: all that differs between frameworks is behind this interface."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch.optim import Optimizer

from chunkstore.regions import Region
from manifest.catalog import Catalog
from publisher.optimizers import StepRecord

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a tensor: those at `start` + k⃗·`stride`, for every k⃗ below `size`, of its memory."""

    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements, live. `tensor`: contiguous."""
        start = int(tensor.storage_offset()) + self.start
        return tensor.detach().as_strided(self.size, self.stride, start)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of one canonical tensor, as this process holds them.

    `tensor`: live, what is published. Its element k⃗ is element `start` + k⃗·`stride` of the canonical tensor `name`;
    None: its elements follow each other there.
    `key`: identifies what an optimizer steps for it; None: nothing does. `view`: its elements in that, and in the
    moments; None: all of them. `master`: what is stepped in its place, and copied to it only after the step.
    `made`: computes what is published in the place of `tensor`, of its shape, in new memory.
    """

    name: str
    tensor: torch.Tensor
    start: int = 0
    stride: tuple[int, ...] | None = None
    key: int | None = None
    view: View | None = None
    master: torch.Tensor | None = None
    made: Callable[[], torch.Tensor] | None = None

    @property
    def region(self) -> Region:
        """Which elements of the canonical tensor these are; there is at least one."""
        if self.stride is None:
            return Region.of(self.start, [self.tensor.numel()], [1])
        return Region.of(self.start, self.tensor.shape, self.stride)

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This piece's elements of what the optimizer steps, or of its moments."""
        return tensor if self.view is None else self.view.of(tensor)


@dataclass(frozen=True, slots=True)
class Made:
    """What `make` computes of a tensor of the model and of `parts`, one or more, which an optimizer steps."""

    parts: tuple[torch.Tensor, ...]
    make: Callable[[], torch.Tensor]

    @property
    def parameter(self) -> torch.Tensor:
        """The first part that is trained, or that could be."""
        return next((part for part in self.parts if part.requires_grad), self.parts[0])


class Selection(Protocol):
    """What of a model is published, and under which names.

    `kind`: for people, the end of the adapter's; may be empty. `whole`: all of it, under its own names.
    """

    @property
    def kind(self) -> str: ...

    @property
    def whole(self) -> bool: ...

    def named(self) -> Mapping[str, torch.Tensor]:
        """The live tensors by canonical name. Raises MappingMismatch if this is no longer what was selected."""

    def made(self, tensor: torch.Tensor) -> Made | None:
        """What is published in the place of `tensor`, one of those that `named` gave last; None: it itself."""

    def check_rest(self, local: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raises MappingMismatch if what is not published, and rollouts have already, is not what it first was.

        `local`: what this process holds of a tensor of the model.
        """


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits in the same order; on any devices."""
    return torch.equal(_bytes(a), _bytes(b).to(a.device))


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Of a copy, for what has a single column counts as contiguous with any stride, and has no view as bytes."""
    return values.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


class Adapter(Protocol):
    """Reads one kind of trainer. Asked anew at every publish, so that what was replaced meanwhile is seen.

    `kind`: for people. `optimizers`: those whose step post-hooks tell of a step; in them the adapter is asked what it
    did. `ranks`: how many processes hold the model together; 1: this one has all of it. `sharable`: a publisher process
    can be given the optimizers' memory.
    """

    @property
    def kind(self) -> str: ...

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...

    @property
    def ranks(self) -> int: ...

    @property
    def sharable(self) -> bool: ...

    def together(self, read: Callable[[], T]) -> T:
        """What `read` returns. What it raises on one rank, all ranks refuse; they all ask together."""

    def named(self) -> Mapping[str, torch.Tensor]:
        """All tensors of the model by canonical name: their shapes, dtypes, and which names are one tensor.

        Nothing else is read from them: they may be on the meta device.
        """

    def pieces(self, catalog: Catalog) -> list[Piece]:
        """What this process holds of the catalog's tensors; none without elements. Raises MappingMismatch."""

    def replicas(self, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
        """For each of `pieces`, which are all of this process's, the ranks that hold just its elements, ascending.

        One of them is to publish these. All ranks ask together.
        """

    def refusal(self, piece: Piece) -> str | None:
        """Why the steps on `piece`, which has a key, cannot be inverted; None if they can."""

    def steps_taken(self, piece: Piece) -> int:
        """How many steps `piece`, which has a key, has taken."""

    def records(
        self, optimizer: Optimizer, wanted: Container[int]
    ) -> Iterator[tuple[int, torch.Tensor, StepRecord]]:
        """Key, what was stepped, and how, of what `optimizer` steps and is `wanted` by key. In its step post-hook."""

    def stepped(self, optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
        """Key, and what is stepped, of all that `optimizer` has just stepped. In its step post-hook."""

    def moved(self) -> bool:
        """Whether `pieces` would tell of other memory than it did last. In step post-hooks: it costs nearly nothing."""

    def begins_step(self, optimizer: Optimizer) -> bool:
        """Whether what `optimizer` has just done counts as a step, and not as more of the one before.

        In its step post-hook, and asked once in each.
        """

    def problems(self, catalog: Catalog) -> list[str]:
        """What is wrong with the map to canonical tensors, as far as the framework itself can tell.

        All ranks ask together, and learn of each other's. Empty where nothing can be told, too.
        """

    def drifted(self, catalog: Catalog) -> list[str]:
        """What several ranks step alike and do not hold alike, with tensor and ranks. All ranks ask together.

        Raises ConfigError where there are other ranks that cannot be asked.
        """
