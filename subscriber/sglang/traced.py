"""What a rank has traced: where the elements of a catalog lie in its memory."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from torch import nn

from manifest.catalog import Catalog
from subscriber.errors import StagedLost
from subscriber.sglang.boxes import BoxMap
from subscriber.sglang.host import Ack
from subscriber.sglang.live import LiveMemories
from subscriber.sglang.wire import file_hash

_KEPT: Final = 2
"""Catalogs: the daemon's, and one that `deltasync smoke` asks for beside it."""


@dataclass(frozen=True, slots=True)
class Traced:
    """`data`: the map as a file, by whose hash requests name it. `covered`: what it says of live elements.

    `foreign`: how often somebody else had written when it was traced.
    """

    catalog: Catalog
    map: BoxMap
    data: bytes
    hash: str
    live: LiveMemories
    covered: Ack
    foreign: int


def trace_model(model: nn.Module, catalog: Catalog, foreign: int) -> Traced:
    """Trace where every element of `catalog` lies. Raises EngineMismatch if any element, there or live, is left."""
    from subscriber.sglang.coverage import coverage
    from subscriber.sglang.trace import trace

    traced = trace(model, catalog)
    covered = coverage(model, traced.map, traced.fills)
    covered.check()
    data = traced.map.to_bytes()
    counts = {"elements": covered.elements, "loaded": covered.loaded, "zeros": covered.zeros}
    return Traced(
        catalog, traced.map, data, file_hash(data), LiveMemories(model, traced.map), counts, foreign
    )


class Known:
    """The maps of the catalogs that were asked for last."""

    def __init__(self) -> None:
        self._by_catalog: OrderedDict[bytes, Traced] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_catalog)

    def of(self, catalog: Catalog, foreign: int) -> Traced | None:
        """That of `catalog`, unless somebody has written since, who may have moved what it maps."""
        found = self._by_catalog.get(catalog.hash)
        if found is None or found.foreign != foreign:
            return None
        self._by_catalog.move_to_end(catalog.hash)
        return found

    def add(self, traced: Traced) -> None:
        self._by_catalog[traced.catalog.hash] = traced
        self._by_catalog.move_to_end(traced.catalog.hash)
        while len(self._by_catalog) > _KEPT:
            self._by_catalog.popitem(last=False)

    def named(self, map_hash: str) -> Traced:
        """Raises StagedLost."""
        for traced in self._by_catalog.values():
            if traced.hash == map_hash:
                self._by_catalog.move_to_end(traced.catalog.hash)
                return traced
        raise StagedLost("this rank has no such map", hint="it is mapped again by itself")
