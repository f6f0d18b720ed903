"""A model whose ties, dtypes or coverage change after attach: refused by name, and never touched by publishing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from publisher.errors import MappingMismatch
from publisher.share import share_optimizer_state
from tests.publisher.zoo import Zoo, adamw, attach, fresh_store


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight


class Ema(nn.Module):
    """A buffer that shows a parameter's memory, walked before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.register_buffer("ema", self.inner.weight.detach())


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(300)
        self.a = nn.Parameter(memory[:200])
        self.b = nn.Parameter(memory[100:])


def _untie(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(20, 8))


def _part(model: Any) -> None:
    model.ema = torch.full((8, 8), 3.0)


def _retype(model: Any) -> None:
    model.steps = torch.tensor(0.5)


def _add(model: Any) -> None:
    model.adapter = nn.Linear(4, 4)


def _remove(model: Any) -> None:
    del model.frozen


@pytest.mark.parametrize(
    ("make", "change", "named"),
    [
        (Tied, _untie, "head.weight is no longer the same tensor as embed.weight"),
        (Ema, _part, "ema is no longer the same tensor as inner.weight"),
        (Zoo, _retype, "steps is now torch.float32 and cannot be sent as I64"),
        (Zoo, _add, "adapter.weight is new in the model"),
        (Zoo, _remove, "frozen.weight is no longer a tensor of shape"),
    ],
)
def test_what_changed_is_refused_by_name(
    make: Callable[[], nn.Module], change: Callable[[Any], None], named: str
) -> None:
    """What is learned at attach is never believed afterwards: an untied head would never be sent again."""
    model = make()
    publisher = attach(model, adamw(model), fresh_store())
    change(model)
    with pytest.raises(MappingMismatch, match=named):
        publisher.publish()
    publisher.close()


@pytest.mark.parametrize(
    ("make", "change", "kept"), [(Tied, _untie, "embed.weight"), (Ema, _part, "inner.weight")]
)
def test_shared_state_never_changes_the_trainer(
    tmp_path: Path, make: Callable[[], nn.Module], change: Callable[[Any], None], kept: str
) -> None:
    model = make()
    shared = share_optimizer_state(adamw(model), model, tmp_path)
    change(model)
    before = model.get_parameter(kept).detach().clone()
    with pytest.raises(MappingMismatch):
        shared.refresh(model)
    assert torch.equal(model.get_parameter(kept), before)


def test_overlapping_parameters_that_part_never_change_the_trainer(tmp_path: Path) -> None:
    model = Overlapping()
    shared = share_optimizer_state(adamw(model), model, tmp_path)
    model.a.data = model.a.data.clone() * 2
    before = model.b.detach().clone()
    with pytest.raises(MappingMismatch):
        shared.bring_home("a", model.a)
    assert torch.equal(model.b, before)


def test_a_parameter_is_watched_whatever_else_shows_its_memory() -> None:
    model = Ema()
    optimizer = adamw(model, lr=1e-2)
    with attach(model, optimizer, fresh_store()) as publisher:
        assert publisher.catalog.aliases == {"ema": "inner.weight"}
        model.inner(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        commit = publisher.publish().result()
        assert commit is not None
        assert commit.manifest.stats.sources == {"inversion": 64}
