"""Turn the fetched chunks of a plan into one staged update: decode, merge per window, write down."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np

from chunkstore.codec import WINDOW, ChunkReader, Section
from manifest.catalog import Catalog, TensorSpec
from manifest.checkpoint import Checkpoint
from manifest.errors import ManifestInvalid
from manifest.merge import merge
from manifest.plan import Plan
from manifest.schema import ChunkRef
from manifest.sections import Sections
from subscriber.disk import disk_errors
from subscriber.spool import Spool
from subscriber.staging import Held, StagedUpdate, StagingWriter
from subscriber.threads import Check

_OPEN_CHUNKS: Final = 256  # mapped at a time; one per version of the chain is needed to go through in order

_Place = tuple[ChunkRef, int]


def stage(
    plan: Plan,
    catalog: Catalog,
    base: Held | None,
    spool: Spool,
    path: Path,
    check: Check,
    checkpoint: Checkpoint | None = None,
) -> StagedUpdate:
    """Write the update of `plan` into the new directory `path`.

    All chunks of the plan are in `spool`. `checkpoint`: what the first step refers to, if it is a reference.
    Memory: one window, whatever the number of versions. Raises StagedLost,
    CorruptObject, ManifestInvalid, StagingFull.
    """
    readers = _Readers(spool, catalog)
    with disk_errors(path.parent), StagingWriter(path, catalog, base, plan.steps[-1]) as writer:
        windows = _by_window(plan)
        for tensor, spec in enumerate(catalog.tensors if checkpoint is not None else ()):
            for window in range(-(-spec.numel // WINDOW)):
                windows.setdefault((tensor, window), [])
        for (tensor, window), places in sorted(windows.items(), key=lambda item: item[0]):
            check()
            spec = catalog.tensors[tensor]
            first = () if checkpoint is None else (_section(checkpoint, spec, tensor, window),)
            update = merge(spec, tensor, window, chain(first, readers.sections(places)))
            if base is None and update.relative is not None:
                raise _without_base(plan, catalog.tensors[tensor].name)
            writer.add(update)
        return writer.finish()


def staged_bytes(plan: Plan, catalog: Catalog) -> int:
    """At most how large the staged values of `plan` become, together with their resolved form if they need one."""
    width = np.array([spec.width for spec in catalog.tensors], np.int64)
    tensor, _, _, whole, changed = Sections.joined(
        chunk.sections for step in plan.steps for chunk in step.chunks
    )
    values = int(np.sum(changed * (width[tensor] + np.where(whole, 0, 4))))
    flags = int(np.sum((changed + 7) // 8))
    if plan.steps and plan.steps[0].kind == "reference":
        values += catalog.nbytes
    values = min(values, sum(t.numel * (t.width + 4) for t in catalog.tensors))
    may_be_relative = not plan.from_anchor and not whole.all()
    return 2 * values + flags if may_be_relative else values


def _section(checkpoint: Checkpoint, spec: TensorSpec, tensor: int, window: int) -> Section:
    start = window * WINDOW
    values = checkpoint.bits(spec.name)[start : start + WINDOW]
    return Section(tensor, spec.dtype, start, start + len(values), None, values)


def _by_window(plan: Plan) -> dict[tuple[int, int], list[_Place]]:
    """Where the sections of each (tensor, window) lie, in version order."""
    out: dict[tuple[int, int], list[_Place]] = defaultdict(list)
    for step in plan.steps:
        for chunk in step.chunks:
            tensors, windows = (
                chunk.sections.columns[0].tolist(),
                (chunk.sections.columns[1] // WINDOW).tolist(),
            )
            for number, place in enumerate(zip(tensors, windows, strict=True)):
                out[place].append((chunk, number))
    return out


def _without_base(plan: Plan, name: str) -> ManifestInvalid:
    target = plan.steps[-1].version
    return ManifestInvalid(
        f"version {target}: {name!r} is given as differences to values that no step from version "
        f"{plan.steps[0].version} on contains",
        hint="the version cannot be used; ask the publisher for an anchor",
    )


class _Readers:
    """The most recently used chunks, opened."""

    def __init__(self, spool: Spool, catalog: Catalog) -> None:
        self._spool = spool
        self._catalog = catalog
        self._open: OrderedDict[bytes, ChunkReader] = OrderedDict()

    def sections(self, places: list[_Place]) -> Iterator[Section]:
        for ref, number in places:
            yield self._reader(ref).decode(number)

    def _reader(self, ref: ChunkRef) -> ChunkReader:
        reader = self._open.get(ref.hash)
        if reader is None:
            reader = self._open[ref.hash] = self._spool.open(ref, self._catalog)
            if len(self._open) > _OPEN_CHUNKS:
                self._open.popitem(last=False)
        self._open.move_to_end(ref.hash)
        return reader
