"""torch optimizers over whole tensors: a plain model, or one that every rank has all of, as with DDP."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from chunkstore.digest_torch import digest
from manifest.catalog import Catalog
from manifest.naming import canonical_tensors
from publisher.adapters.base import Piece, Selection
from publisher.adapters.ranks import ALONE, Ranks
from publisher.errors import MappingMismatch, OptimizerRefused
from publisher.optimizers import StepRecord, not_invertible, step_records, stepped, steps_taken

T = TypeVar("T")

Masters = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""(16-bit parameter of the model, the master that an optimizer steps in its place) pairs."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A parameter, and the optimizer and group that step it."""

    parameter: torch.Tensor
    optimizer: Optimizer
    group: dict[str, Any]


class Trained:
    """What `optimizers` step, themselves or by `masters`; of what they know, only what requires a gradient."""

    def __init__(self, optimizers: Sequence[Optimizer], masters: Masters) -> None:
        self._optimizers, self._masters = optimizers, {id(parameter) for parameter, _ in masters}

    def of(self, named: Mapping[str, torch.Tensor]) -> list[str]:
        """The names of what is trained."""
        stepped = {id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]}
        stepped |= self._masters
        return [name for name, tensor in named.items() if tensor.requires_grad and id(tensor) in stepped]

    def check_all_of(
        self, model: nn.Module, published: Iterable[torch.Tensor], others: str, hint: str
    ) -> None:
        """Raises MappingMismatch if more of `model` is trained than is `published`: `others`, as people call it."""
        known = {id(tensor) for tensor in published}
        rest = {name: t for name, t in canonical_tensors(model).items() if id(t) not in known}
        lost = self.of(rest)
        if lost:
            raise MappingMismatch(f"the optimizer trains {others}: {', '.join(lost[:10])}", hint=hint)


class PlainAdapter:
    """Every tensor that is published whole, and in all `ranks` alike.

    `masters`: what the optimizers step in place of parameters. `selection`: what of the model is published.
    """

    kind = "plain torch"
    sharable = True

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        masters: Masters = (),
        ranks: Ranks = ALONE,
        *,
        selection: Selection,
    ) -> None:
        self.optimizers = tuple(optimizers)
        self.ranks = 1
        self._model, self._selection = model, selection
        self.sharable = type(self).sharable and selection.whole
        self._ranks = ranks
        self.everyone = tuple(range(ranks.size))
        self.kind = ("DDP" if data_parallel(model) else self.kind) + selection.kind
        self._stepped = _stepped(self.optimizers)
        self._masters = self._masters_of(masters)

    def together(self, read: Callable[[], T]) -> T:
        """See `Adapter`."""
        return self._ranks.together(read)

    def named(self) -> Mapping[str, torch.Tensor]:
        """See `Adapter`."""
        return self._selection.named()

    def pieces(self, catalog: Catalog) -> list[Piece]:
        """See `Adapter`."""
        live = self.named()
        self._selection.check_rest(self.local)
        tied: dict[str, list[torch.Tensor]] = {spec.name: [live[spec.name]] for spec in catalog.tensors}
        for alias, name in catalog.aliases.items():
            tied[name].append(live[alias])
        found: list[Piece] = []
        for (
            name,
            tensors,
        ) in tied.items():  # of several that show the same elements, the one that an optimizer knows
            known = next((t for t in tensors if self.stepping(t)["key"] is not None), tensors[0])
            found += self.pieces_of(name, known)
        return found

    def pieces_of(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """What this process holds of one tensor of the model."""
        check_readable(name, tensor)
        yield Piece(name, tensor, **self.stepping(tensor))

    def replicas(self, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
        """See `Adapter`."""
        return [self.everyone] * len(pieces)

    def stepping(self, tensor: torch.Tensor) -> dict[str, Any]:
        """The fields of a Piece that tell what steps `tensor`, a tensor of the model, and what is made of it."""
        carrier = self.carrier(tensor)
        made = self._selection.made(tensor)
        if made is not None:
            stepped = self._masters.get(id(carrier), carrier)
            return {"key": id(stepped) if id(stepped) in self._stepped else None, "made": made.make}
        master = self._masters.get(id(tensor))
        if master is not None:
            return {"key": id(master), "master": self.local(master)}
        return {"key": id(tensor) if id(tensor) in self._stepped and not self.idle(tensor) else None}

    def idle(self, tensor: torch.Tensor) -> bool:
        """Whether an optimizer that has `tensor` only carries it along, as often the frozen rest beside adapters."""
        return not (self._selection.whole or tensor.requires_grad or self._selection.made(tensor))

    def carrier(self, tensor: torch.Tensor) -> torch.Tensor:
        """What an optimizer steps, or may step, for `tensor`: itself, or what goes into what is made of it."""
        made = self._selection.made(tensor)
        return tensor if made is None else made.parameter

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this process has of it."""
        return tensor

    def refusal(self, piece: Piece) -> str | None:
        """See `Adapter`."""
        assert piece.key is not None
        it = self._stepped[piece.key]
        return not_invertible(it.parameter, it.optimizer, it.group)

    def steps_taken(self, piece: Piece) -> int:
        """See `Adapter`."""
        assert piece.key is not None
        it = self._stepped[piece.key]
        return steps_taken(it.optimizer.state.get(it.parameter) or {})

    def records(
        self, optimizer: Optimizer, wanted: Container[int]
    ) -> Iterator[tuple[int, torch.Tensor, StepRecord]]:
        """See `Adapter`."""
        for parameter, record in step_records(optimizer, wanted):
            yield id(parameter), self.local(parameter), record.of(self.local)

    def stepped(self, optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
        """See `Adapter`."""
        return ((id(parameter), self.local(parameter)) for parameter in stepped(optimizer))

    def moved(self) -> bool:
        """See `Adapter`: what is replaced here is seen at publish."""
        return False

    def begins_step(self, optimizer: Optimizer) -> bool:
        """See `Adapter`."""
        return True

    def problems(self, catalog: Catalog) -> list[str]:
        """See `Adapter`: whole tensors have no map, but what several ranks step alike must be the same on all."""
        return self._ranks.strange(catalog) or self._compared([], catalog)

    def drifted(self, catalog: Catalog) -> list[str]:
        """See `Adapter`."""
        self._ranks.check_company()
        return self._compared([], catalog)

    def _compared(self, own: list[str], catalog: Catalog) -> list[str]:
        """What is wrong on any rank: `own` of each, and copies that differ."""
        if not self._ranks.connected:
            return own
        return self._ranks.problems(own, self._ranks.together(lambda: self._copies(catalog)))

    def _copies(self, catalog: Catalog) -> dict[str, int]:
        """Digests of what this rank steps, or has beside others, by tensor and place: the name, a space, and more."""
        found = {}
        for piece in self.pieces(catalog):
            if piece.key is not None:
                found[place(piece)] = digest(piece.name, piece.tensor)
                made = self._selection.made(piece.tensor)
                for number, part in enumerate(made.parts if made else ()):
                    found[f"{place(piece)} {number}"] = digest(piece.name, part.detach())
        return found

    def _masters_of(self, masters: Masters) -> dict[int, torch.Tensor]:
        """The master of each parameter, by the parameter's `id()`."""
        names = self._names()
        found, problems = {}, []
        for parameter, master in masters:
            name = names.get(id(parameter))
            if name is None:
                problems.append(f"a parameter of shape {tuple(parameter.shape)} is not in the model")
            elif id(parameter) in self._stepped:
                problems.append(f"{name} is in the optimizer itself, beside its master")
            elif id(master) not in self._stepped:
                problems.append(f"the master of {name} is in no optimizer")
            elif master.shape != parameter.shape or not master.is_floating_point():
                form, wanted = f"{master.dtype} {tuple(master.shape)}", tuple(parameter.shape)
                problems.append(f"the master of {name} is {form}, not floats of shape {wanted}")
            found[id(parameter)] = master
        if problems:
            raise OptimizerRefused(
                "masters do not fit: " + "; ".join(problems[:30]),
                hint="give (parameter of the model, the master that the attached optimizer steps for it) pairs",
            )
        return found

    def _names(self) -> dict[int, str]:
        """The name of each tensor that may have a master, by `id()`."""
        return {id(tensor): name for name, tensor in self.named().items()}


def data_parallel(model: nn.Module) -> list[DistributedDataParallel]:
    """`model` itself or what is in it, such as below torch.compile's wrapper: ranks step it alike, each for itself."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def place(piece: Piece) -> str:
    """Names the elements of a piece: the tensor first."""
    region = piece.region
    return f"{piece.name} {region.start} {region.size} {region.stride}"


def check_readable(name: str, tensor: torch.Tensor) -> None:
    """Raises MappingMismatch unless the elements of `tensor` are those that lie in its memory."""
    if is_traceable_wrapper_subclass(tensor):
        raise MappingMismatch(
            f"{name} is a {type(tensor).__name__}, whose elements lie in other tensors",
            hint="attach after fully_shard, parallelize_module and quantization; docs/trainers.md lists what works",
        )


def _stepped(optimizers: Sequence[Optimizer]) -> dict[int, Stepped]:
    """What is stepped, by `id()`."""
    found: dict[int, Stepped] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in found:
                    raise OptimizerRefused(
                        f"a parameter of shape {tuple(parameter.shape)} is in two optimizers",
                        hint="its steps could not be told apart: give each parameter one optimizer",
                    )
                found[id(parameter)] = Stepped(parameter, optimizer, group)
    return found
