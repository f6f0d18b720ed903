"""Which elements of a parameter ZeRO-3 gives to which rank, against what it does: pad, and cut in equal parts."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from publisher.adapters.deepspeed_zero3 import _cut


@given(st.integers(0, 300), st.integers(1, 40))
def test_shards_without_their_padding_are_the_parameter(numel: int, ranks: int) -> None:
    each = -(-numel // ranks)
    shards = torch.cat([torch.arange(numel), torch.full((each * ranks - numel,), -1)]).view(ranks, each)
    for rank, shard in enumerate(shards):
        start, count = _cut(numel, each, rank)
        assert shard[:count].tolist() == list(range(start, start + count))
        assert (shard[count:] == -1).all()
