"""Account for every live element: loaded from exactly one canonical element, or zeroed by the loader and still zero."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from chunkstore.regions import Indices, Region, runs
from subscriber.errors import EngineMismatch, name_offenders
from subscriber.sglang.boxes import Box, BoxMap, locate
from subscriber.sglang.memories import Memories
from subscriber.sglang.trace import Fill

Counts = npt.NDArray[np.uint8]

_SLAB: Final = 1 << 22  # elements looked at together: a few MiB of counts
_FEW: Final = 64  # runs shorter than this are marked through an index array


@dataclass(frozen=True, slots=True)
class Coverage:
    """Live elements of parameters and persistent buffers: `elements` = `loaded` + `zeros` + those of the offenders.

    `loaded`: in exactly one box. `zeros`: in none, zeroed by the loader, and zero. `offenders`: the rest, in words.
    """

    elements: int
    loaded: int
    zeros: int
    offenders: tuple[str, ...]

    def check(self) -> None:
        """Raise EngineMismatch naming all offenders, if there are any."""
        if self.offenders:
            raise EngineMismatch(
                f"live weights are not accounted for: {name_offenders(list(self.offenders))}",
                hint="these would keep old values; serve the architecture that is trained, without further weights",
            )


def coverage(model: nn.Module, map_: BoxMap, fills: Sequence[Fill]) -> Coverage:
    """How the elements of the live model are accounted for by its map and its loader's fills.

    Reads no weights but those that the loader zeroes. Memory is bounded by a slab of elements, not by a parameter.
    """
    memories = Memories(model)
    if memories.problems or memories.found != map_.memories:
        why = memories.problems or ["the parameters are others than those that were traced"]
        return Coverage(sum(m.numel for m in memories.found), 0, 0, tuple(why))
    elements = loaded = zeros = 0
    offenders: list[str] = []
    targets: list[list[Region]] = [[] for _ in memories.found]
    for box in map_.boxes:
        targets[box.memory].append(box.target_region)
    for number, memory in enumerate(memories.found):
        views = [
            Region.of(int(tensor.storage_offset()), tensor.shape, tensor.stride())
            for _, tensor in memories.tensors[number]
        ]
        whole = Region.of(0, (memory.numel,), (1,))
        if whole in views and sum(region.numel for region in targets[number]) == memory.numel:
            # Boxes of a checked map do not overlap, so these tile the memory.
            elements += memory.numel
            loaded += memory.numel
            continue
        report = _Report(memories.tensors[number])
        filled = [fill.region for fill in fills if fill.memory == number]
        for start in range(0, memory.numel, _SLAB):
            stop = min(start + _SLAB, memory.numel)
            live = _count(views, start, stop) > 0
            boxed = _count(targets[number], start, stop)
            idle = live & (boxed == 0)
            zeroed = idle & (_count(filled, start, stop) > 0)
            report.add("loaded twice", start, live & (boxed > 1))
            report.add("not loaded from any checkpoint tensor", start, idle & ~zeroed)
            if zeroed.any():
                wrong = _nonzero(memories.tensors[number][0][1], start, zeroed)
                report.add("zeroed by the loader, but not zero now", start, wrong)
                zeroed &= ~wrong
            elements += int(live.sum())
            loaded += int((live & (boxed == 1)).sum())
            zeros += int(zeroed.sum())
        offenders += report.lines()
    return Coverage(elements, loaded, zeros, tuple(offenders))


def _count(regions: Sequence[Region], start: int, stop: int) -> Counts:
    """How many of `regions` hold each element from `start` to `stop` (255 stands for more)."""
    counts = np.zeros(stop - start, np.uint16)
    for region in regions:
        for firsts, length in runs(region, start, stop):
            at = firsts - start
            if length < _FEW:
                counts[(at[:, None] + np.arange(length)).ravel()] += 1
            else:
                for first in at.tolist():
                    counts[first : first + length] += 1
    return np.minimum(counts, 255).astype(np.uint8)


def _nonzero(tensor: torch.Tensor, start: int, where: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which of the elements `start` + i of the tensor's storage, for i in `where`, have a bit set."""
    flat = tensor.detach().as_strided((len(where),), (1,), start)
    at = np.flatnonzero(where)
    bits = flat[torch.from_numpy(at).to(flat.device)].view(torch.uint8).view(len(at), -1)
    out = np.zeros(len(where), bool)
    out[at] = (bits != 0).any(dim=1).cpu().numpy()
    return out


class _Report:
    """Offending elements of one memory, by reason, parameter and row."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._found: dict[tuple[str, str], tuple[int, npt.NDArray[Any]]] = {}

    def add(self, reason: str, start: int, where: npt.NDArray[np.bool_]) -> None:
        if not where.any():
            return
        indices = np.flatnonzero(where) + start
        for name, tensor in self._tensors:
            rows = _rows(tensor, indices)
            if len(rows):
                count, before = self._found.get((name, reason), (0, np.empty(0, np.int64)))
                self._found[name, reason] = count + len(rows), np.union1d(before, rows)

    def lines(self) -> Iterator[str]:
        for (name, reason), (count, rows) in self._found.items():
            yield f"{name!r}, rows {_ranges(rows.tolist())}: {count:,} elements are {reason}"


def _rows(tensor: torch.Tensor, indices: Indices) -> Indices:
    """The row of `tensor` that each of the storage elements `indices` lies in; those outside of it drop out."""
    shape = tuple(tensor.shape)
    logical = [prod(shape[d + 1 :]) for d in range(len(shape))]
    # A view's elements in memory order, with the row-major index as the "target".
    box = Box.of(0, 0, int(tensor.storage_offset()), 0, shape, tensor.stride(), logical)
    return locate(box, indices)[1] // (logical[0] if logical else 1)


def _ranges(rows: list[int], limit: int = 8) -> str:
    parts = []
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        run = [row for _, row in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return ", ".join(parts[:limit]) + (", …" if len(parts) > limit else "")
