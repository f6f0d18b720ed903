"""Every live element is accounted for, or named by parameter and row."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from chunkstore.regions import Region
from manifest.catalog import Catalog, TensorSpec
from subscriber.errors import EngineMismatch
from subscriber.sglang import coverage as module
from subscriber.sglang.boxes import Box, BoxMap
from subscriber.sglang.coverage import coverage
from subscriber.sglang.memories import Memories
from subscriber.sglang.trace import Fill, trace

CATALOG = Catalog.of([TensorSpec("a", "BF16", (7, 40)), TensorSpec("b", "BF16", (4,))])


class Padded(nn.Module):
    """10 × 50 rows and columns, of which a checkpoint fills 7 × 40; a persistent buffer; one that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(10, 50).bfloat16(), requires_grad=False)
        self.register_buffer("bias", torch.ones(4).bfloat16())
        self.register_buffer("cache", torch.ones(9), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "a":
                self.w.data[:7, :40].copy_(loaded)
                self.w.data[7:].zero_()
                self.w.data[:7, 40:].fill_(0)
            else:
                self.get_buffer("bias").copy_(loaded)


def box(rows: int, columns: int, row: int = 0, column: int = 0) -> Box:
    return Box.of(0, 0, row * 40 + column, row * 50 + column, (rows, columns), (40, 1), (50, 1))


BIAS = Box.of(1, 1, 0, 0, (4,), (1,), (1,))
BELOW, RIGHT = Fill(0, Region(350, (150,), (1,))), Fill(0, Region(40, (7, 10), (50, 1)))


def map_of(model: nn.Module, *boxes: Box) -> BoxMap:
    return BoxMap(CATALOG.hash, Memories(model).found, boxes)


@pytest.fixture(params=[1 << 22, 64, 7])
def _slabs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLAB", request.param)


@pytest.fixture
def model() -> Padded:
    model = Padded()
    model.load_weights([("a", torch.ones(7, 40)), ("b", torch.ones(4))])
    return model


@pytest.mark.usefixtures("_slabs")
def test_loaded_and_zeroed(model: Padded) -> None:
    traced = trace(model, CATALOG)
    assert traced.map.boxes == (box(7, 40), BIAS)
    assert set(traced.fills) == {BELOW, RIGHT}
    found = coverage(model, traced.map, traced.fills)
    found.check()
    assert (found.elements, found.loaded, found.zeros, found.offenders) == (504, 284, 220, ())


@pytest.mark.usefixtures("_slabs")
def test_gaps_are_named_by_row(model: Padded) -> None:
    found = coverage(model, map_of(model, box(2, 40), box(3, 40, row=3), box(1, 39, row=6)), [BELOW, RIGHT])
    assert found.offenders == (
        "'w', rows 2, 6: 41 elements are not loaded from any checkpoint tensor",
        "'bias', rows 0 to 3: 4 elements are not loaded from any checkpoint tensor",
    )
    assert (found.elements, found.loaded, found.zeros) == (504, 5 * 40 + 39, 220)
    with pytest.raises(EngineMismatch, match="'w', rows 2, 6: 41 elements"):
        found.check()


@pytest.mark.usefixtures("_slabs")
def test_zeros_must_be_zero(model: Padded) -> None:
    model.w.data[8, 5] = 1
    model.w.data[9, 5] = -0.0
    model.w.data[0, 41] = 1
    found = coverage(model, map_of(model, box(7, 40), BIAS), [BELOW, RIGHT])
    assert found.offenders == ("'w', rows 0, 8 to 9: 3 elements are zeroed by the loader, but not zero now",)
    assert found.zeros == 217


@pytest.mark.usefixtures("_slabs")
def test_elements_that_are_loaded_twice(model: Padded) -> None:
    found = coverage(model, map_of(model, box(7, 40), box(1, 3, row=1, column=3), BIAS), [BELOW, RIGHT])
    assert found.offenders == ("'w', rows 1: 3 elements are loaded twice",)


def test_another_model(model: Padded) -> None:
    map_ = map_of(model, box(7, 40), BIAS)
    model.more = nn.Parameter(torch.ones(3), requires_grad=False)
    assert coverage(model, map_, []).offenders == ("the parameters are others than those that were traced",)


def test_views_of_a_larger_storage() -> None:
    """Elements of a storage in which no parameter lies are nobody's; tied views count once."""
    model = nn.Module()
    flat = torch.ones(100).bfloat16()
    model.w = nn.Parameter(flat[10:50].view(8, 5), requires_grad=False)
    model.tied = nn.Parameter(flat[10:50].view(8, 5), requires_grad=False)
    catalog = Catalog.of([TensorSpec("w", "BF16", (8, 5))])
    map_ = BoxMap(catalog.hash, Memories(model).found, (Box.of(0, 0, 0, 10, (40,), (1,), (1,)),))
    found = coverage(model, map_, [])
    assert (found.elements, found.loaded, found.offenders) == (40, 40, ())
    half = BoxMap(catalog.hash, map_.memories, (Box.of(0, 0, 0, 10, (20,), (1,), (1,)),))
    assert coverage(model, half, []).offenders == (
        "'w', rows 4 to 7: 20 elements are not loaded from any checkpoint tensor",
    )
