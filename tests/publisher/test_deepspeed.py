"""The geometry of DeepSpeed's flat buffers, and what counts as a step; the real thing is in tests/deepspeed."""

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from publisher.adapters.deepspeed import Placed
from publisher.adapters.flat import Flat
from publisher.adapters.groupwise import GroupwiseAdapter
from publisher.adapters.lora import WholeModel


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 9))
def test_the_ranks_pieces_are_each_parameter_once(sizes: list[int], ranks: int, padding: int) -> None:
    total = sum(sizes)
    size = -(-(total + padding) // ranks)
    whole = torch.arange(float(size * ranks))
    parts = [
        Flat(whole[r * size : (r + 1) * size], whole[r * size : (r + 1) * size] + 0.5) for r in range(ranks)
    ]
    begin = 0
    for numel in sizes:
        parameter, end = whole[begin : begin + numel], 0
        for rank, part in enumerate(parts):
            piece = Placed(parameter, part, begin - rank * size).piece("x")
            if piece is None:
                continue
            assert piece.start == end
            end += piece.tensor.numel()
            assert piece.tensor.equal(parameter[piece.start : end])
            assert piece.master is not None
            assert piece.master.equal(piece.tensor + 0.5)
            assert piece.part_of(part.master).equal(piece.master)
        assert end == numel
        begin += numel


class Parameters(GroupwiseAdapter):
    """Each parameter of its own group, with no flat buffers."""

    def buffers(self) -> Sequence[torch.Tensor]:
        return ()


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), min_size=1, max_size=8))
    )
)
def test_groups_that_are_stepped_one_by_one_are_one_step(groups_and_cuts: tuple[int, list[int]]) -> None:
    """In each round all groups are stepped, so many at a time as drawn."""
    groups, rounds = groups_and_cuts
    model = torch.nn.ParameterList(torch.zeros(1) for _ in range(groups))
    optimizer = torch.optim.SGD([{"params": [p]} for p in model], lr=0.1)
    adapter = Parameters(model, [optimizer], selection=WholeModel(model))
    everything, begun = optimizer.param_groups, 0
    for at_once in rounds:
        for first in range(0, groups, at_once):
            optimizer.param_groups = everything[first : first + at_once]
            begun += adapter.begins_step(optimizer)
    assert begun == len(rounds)
