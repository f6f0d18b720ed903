"""Find out where a model keeps each canonical element by watching its own `load_weights`.

The loader gets a stand-in for every tensor of the catalog, and everything that it does with them is geometry (see
`standin`). So sharding, fused projections, replicated heads, experts and padding are known for every model that SGLang
can load, without a table of models. Nothing is written (see `guard`). What cannot be followed is refused by name.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from chunkstore.regions import Region, disjoint
from chunkstore.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES
from manifest.catalog import Catalog
from subscriber.errors import EngineMismatch, name_offenders
from subscriber.sglang.boxes import Box, BoxMap
from subscriber.sglang.compose import ZEROS
from subscriber.sglang.guard import Guard, Snapshot, inline_jobs
from subscriber.sglang.memories import Memories
from subscriber.sglang.standin import StandIn, all_zeros, moved

aten = torch.ops.aten

MAX_RUNS: Final = 100
"""Times that the loader is run without the tensors it failed on, so that all of them are named."""

_FILLS: Final = frozenset({aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default})


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements of memory number `memory` that the loader fills with zeros."""

    memory: int
    region: Region


@dataclass(frozen=True, slots=True)
class Traced:
    """One rank's map, what its loader fills with zeros, and how long tracing took."""

    map: BoxMap
    fills: tuple[Fill, ...]
    seconds: float


class Refused(Exception):
    """Raised inside the loader where a tensor cannot be followed; the recorder has noted it."""


def trace(model: nn.Module, catalog: Catalog) -> Traced:
    """Run `model.load_weights` over stand-ins for the tensors of `catalog`, under their names and aliases.

    Call it on the thread that the engine changes weights on. A tensor that this rank does not hold has no box; that
    all ranks together hold all of them is for `Layout` to check. Raises EngineMismatch naming every offender.
    """
    started = time.perf_counter()
    memories = Memories(model)
    problems = list(memories.problems)
    errors: list[_Error] = []
    skip: set[str] = set()
    for _ in range(MAX_RUNS if not problems else 0):
        run = _Run(memories, catalog, skip)
        run.load(model)
        problems += run.problems
        errors += run.errors
        if not run.failed - skip:
            # A tied tensor may be unknown to the loader under one of its names, if it is loaded under another.
            problems += [
                e.why for e in errors if not (e.tied and any(b.tensor == e.tensor for b in run.boxes))
            ]
            break
        skip |= run.failed
    else:
        problems += [error.why for error in errors]
    if problems:
        raise EngineMismatch(
            f"the engine's loader cannot be followed: {name_offenders(list(dict.fromkeys(problems)))}",
            hint="see docs/troubleshooting.md, engine_mismatch; nothing was written",
        )
    boxes = tuple(sorted(dict.fromkeys(run.boxes), key=lambda b: (b.tensor, b.source, b.memory, b.target)))
    map_ = BoxMap(catalog.hash, memories.found, boxes)
    map_.check(catalog)
    return Traced(map_, tuple(dict.fromkeys(run.fills)), time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _Error:
    """The loader raised while it had tensor number `tensor`. `tied`: the tensor has more names than one."""

    tensor: int
    tied: bool
    why: str


class _Run:
    """One run of the loader. `problems`, `errors`: what is wrong; `failed`: names to leave out of the next run."""

    def __init__(self, memories: Memories, catalog: Catalog, skip: set[str]) -> None:
        self.boxes: list[Box] = []
        self.fills: list[Fill] = []
        self.problems: list[str] = []
        self.errors: list[_Error] = []
        self.failed: set[str] = set()
        self._memories, self._catalog, self._skip = memories, catalog, skip
        self._names: list[list[str]] = [[spec.name] for spec in catalog.tensors]
        for alias, name in catalog.aliases.items():
            self._names[catalog.ids[name]].append(alias)
        self._loading: tuple[int, str] | None = None

    def load(self, model: nn.Module) -> None:
        snapshot = Snapshot(model)
        load: Callable[[Iterator[tuple[str, torch.Tensor]]], object] = model.load_weights  # type: ignore[assignment]
        stand_ins = [
            StandIn.whole(number, spec.shape, TORCH_DTYPES[spec.dtype], self)
            for number, spec in enumerate(self._catalog.tensors)
        ]
        try:
            with torch.no_grad(), inline_jobs(self._fail), Guard(self._memories.is_live, self._direct_write):
                load(self._named(stand_ins))
        except Exception as error:  # noqa: BLE001  # a loader may raise anything; it is reported by name
            self._fail(error)
        finally:
            self.problems += snapshot.restore()

    def _named(self, stand_ins: Sequence[StandIn]) -> Iterator[tuple[str, torch.Tensor]]:
        """What the loader gets: each tensor under each of its names, like a checkpoint file that it reads."""
        for number, stand_in in enumerate(stand_ins):
            for name in self._names[number]:
                if name not in self._skip:
                    self._loading = number, name
                    yield name, stand_in
        self._loading = None

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Refused) or getattr(error, "_deltasync_seen", False):
            return
        error._deltasync_seen = True  # type: ignore[attr-defined]  # a job's error comes again with its result
        what = f"{type(error).__name__}: {error}"[:300]
        if self._loading is None:
            self.problems.append(f"the loader failed after the last tensor: {what}")
        else:
            number, name = self._loading
            self.failed.add(name)
            tied = len(self._names[number]) > 1
            self.errors.append(_Error(number, tied, f"{name!r} makes the loader fail with {what}"))

    def refuse(self, pieces: Sequence[Box], why: str) -> Exception:
        """See `standin.Recorder`."""
        numbers = sorted({piece.tensor for piece in pieces} - {ZEROS})
        names = [name for number in numbers for name in self._names[number]]
        what = " and ".join(repr(self._catalog.tensors[number].name) for number in numbers)
        self.failed |= set(names)
        self.problems.append(f"{what} {why}")
        return Refused(self.problems[-1])

    def write(self, target: torch.Tensor, source: StandIn) -> None:
        """See `standin.Recorder`."""
        memory = self._memories.number(target)
        if memory is None:
            where = self._memories.name(target)
            raise self.refuse(source.pieces, f"is copied to {where}, which is not a parameter")
        if target.dtype != source.dtype or not self._memories.fits(target, memory):
            here, there = (DTYPE_NAMES.get(t.dtype, str(t.dtype)) for t in (source, target))
            name = self._memories.found[memory].name
            raise self.refuse(source.pieces, f"is {here} in the catalog, {there} in the engine ({name!r})")
        for box in moved(source, target, memory):
            if box.tensor == ZEROS:
                self._fill(memory, box.target_region)
            else:
                self.boxes.append(box)

    def _direct_write(self, func: Callable[..., Any], target: torch.Tensor, args: tuple[Any, ...]) -> None:
        """The loader writes live memory without a checkpoint tensor: allowed where it writes zeros."""
        name, memory = self._memories.name(target), self._memories.number(target)
        if func not in _FILLS:
            self.problems.append(f"{name} is changed by {func}, which cannot be followed")
            if self._loading:
                self.failed |= set(self._names[self._loading[0]])
            raise Refused(self.problems[-1])
        if not target.numel():
            return
        value = args[1] if len(args) > 1 else 0
        zeros = all_zeros(value if isinstance(value, torch.Tensor) else torch.tensor(value))
        if memory is None:
            if isinstance(value, torch.Tensor):
                self.problems.append(f"{name} is computed when weights are loaded, and would not follow them")
        elif not zeros:
            self.problems.append(f"{name} is filled by its loader with values that no checkpoint has")
        elif not self._memories.fits(target, memory):
            self.problems.append(f"{name} is zeroed as if it had another dtype")
        else:
            self._fill(memory, Region.of(int(target.storage_offset()), target.shape, target.stride()))

    def _fill(self, memory: int, region: Region) -> None:
        name = self._memories.found[memory].name
        if not region.nested:
            self.problems.append(f"{name!r} is zeroed through a view in which elements repeat")
            return
        covered = {
            self._catalog.tensors[box.tensor].name
            for box in self.boxes
            if box.memory == memory and not disjoint(box.target_region, region)
        }
        if covered:
            self.problems.append(f"{name!r} is zeroed where {sorted(covered)} were loaded before")
        self.fills.append(Fill(memory, region))
