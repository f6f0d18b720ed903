"""Places among several writers, and ranges of the model, that cannot be: said before anything is written."""

from pathlib import Path

import pytest
import torch
from torch import distributed

from chunkstore.errors import ConfigError
from publisher.errors import MappingMismatch
from publisher.group import Owned, Writer
from tests.publisher.ranks import Crew
from tests.publisher.zoo import fresh_store


def test_a_place_in_a_process_group(tmp_path: Path) -> None:
    """A group of one, as torch.distributed reports it; the run's name is new every time."""
    distributed.init_process_group("gloo", f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        whole = Writer.of_process_group()
        again = Writer.of_process_group(group=distributed.new_group([0]))
    finally:
        distributed.destroy_process_group()
    assert (
        (whole.rank, whole.world_size, whole.owned)
        == (again.rank, again.world_size, again.owned)
        == (0, 1, None)
    )
    assert whole.run != again.run


@pytest.mark.parametrize(
    ("place", "problem"),
    [((2, 2, "r"), "writer 2 of 2 is impossible"), ((-1, 2, "r"), "impossible"), ((0, 2, ""), "no name")],
)
def test_impossible_places_are_refused(place: tuple[int, int, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Writer(*place)


def test_a_spool_is_for_a_single_writer(tmp_path: Path) -> None:
    crew = Crew(2)
    crew.stores = [fresh_store()] * 2
    with pytest.raises(ConfigError, match="with `spool` one process"):
        crew.attaching(1, spool=str(tmp_path))()


@pytest.mark.parametrize(
    ("owned", "problem"),
    [
        (Owned("nothing", torch.zeros(3)), "nothing is not a tensor of the model"),
        (Owned("norm", torch.zeros(3), 62), "norm has 64 elements, not 62…65"),
        (Owned("norm", torch.zeros(3), -1), "norm has 64 elements, not -1…2"),
        (Owned("count", torch.zeros(3), 0), "count is torch.float32 and cannot be sent as I64"),
    ],
)
def test_ranges_that_the_model_does_not_have_are_refused(owned: Owned, problem: str) -> None:
    crew = Crew(2)
    crew.ranks[1].owned.append(owned)
    crew.stores = [fresh_store()] * 2
    with pytest.raises(MappingMismatch, match=problem):
        crew.attaching(1)()
