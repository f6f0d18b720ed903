"""Live memory by its places: what is written, compared and read there, whatever blocks it is cut into."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subscriber.sglang import live
from subscriber.sglang.wire import Piece


@given(
    run=st.integers(1, 7),
    count=st.just(1) | st.integers(0, 9),
    block=st.integers(1, 3) | st.integers(4, 12),
    width=st.sampled_from([1, 2, 4, 8]),
    on_host=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_piece_lies_where_its_runs_are_however_it_is_cut(
    run: int, count: int, block: int, width: int, on_host: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 256, (100, width), np.uint8).view(f"u{width}").ravel()
    targets = run * rng.permutation(100 // run)[:count]
    bits = rng.integers(0, 256, (run * count, width), np.uint8).view(f"u{width}").ravel()
    expected = before.copy()
    places = (targets[:, None] + np.arange(run)).ravel()
    expected[places] = bits

    memory = torch.from_numpy(before.view(f"i{width}" if width > 1 else "u1").copy())
    piece = Piece(0, run, int(targets.min(initial=99)), count)
    with patch.object(live, "_BLOCK", block):
        new = live.cut(piece, targets, bits, on_host=on_host)
    assert live.holds(memory, piece, new) == bool((before[places] == bits).all())
    assert live.write(memory, piece, new)
    assert memory.numpy().tobytes() == expected.tobytes()
    assert live.holds(memory, piece, new)
    assert live.gather(memory, piece, targets).tobytes() == bits.tobytes()


@pytest.mark.parametrize("run", [1, 3])
def test_no_block_is_larger_than_what_stays_near(run: int) -> None:
    """What is written is read back while its cache lines are near; a device would rather have one kernel."""
    piece = Piece(0, run, 0, 1 << 15)
    targets, bits = run * np.arange(piece.count), np.zeros(piece.elements, np.uint16)
    cut = live.cut(piece, targets, bits, on_host=True)
    assert max(len(values) for _, values in cut) <= 1 << 14
    assert len(live.cut(piece, targets, bits, on_host=False)) == 1
