"""Orders and their arrays: what cannot be is refused before anything is allocated, read or written by it."""

from pathlib import Path

import msgpack
import numpy as np
import pytest

from chunkstore.codec import WINDOW
from subscriber.errors import StagedLost
from subscriber.sglang.boxes import Memory
from subscriber.sglang.wire import ArrayReader, ArrayWriter, Order, Piece, RankFiles

MEMORIES = (Memory("weight", "BF16", 100), Memory("norm", "F32", 5))


def test_an_order_comes_back() -> None:
    order = Order("ab", (Piece(0, 3, 7, 4), Piece(1, 1, 0, 5), Piece(0, 1, 0, WINDOW)))
    assert Order.from_bytes(order.to_bytes(), MEMORIES) == order


@pytest.mark.parametrize(
    "piece",
    [
        (2, 1, 0, 1),
        (0, 1, 0, WINDOW + 1),
        (0, WINDOW, 0, 2),
        (0, WINDOW + 1, 0, 1),
        (0, 0, 0, 1),
        (0, 1, -1, 1),
        (0, 1, 0, 1 << 60),
    ],
)
def test_an_order_of_what_cannot_be_is_refused(piece: tuple[int, ...]) -> None:
    data = msgpack.packb({"format": 1, "map": "ab", "pieces": [[0, 1, 0, 1], piece]})
    with pytest.raises(StagedLost):
        Order.from_bytes(data, MEMORIES)


@pytest.mark.parametrize("data", [b"", b"junk", msgpack.packb({"format": 2, "map": "", "pieces": []})])
def test_what_is_no_order_is_refused(data: bytes) -> None:
    with pytest.raises(StagedLost):
        Order.from_bytes(data, MEMORIES)


@pytest.mark.parametrize(("base", "last"), [(0, 98), (90, 8)])
def test_targets_never_lead_out_of_their_memory(base: int, last: int, tmp_path: Path) -> None:
    """Runs of three from the last element but two fit, and no further."""
    for beyond in (0, 1):
        files = RankFiles(tmp_path, 0, Order("ab", (Piece(0, 3, base, 2),)), MEMORIES)
        with files.writer("targets") as writer:
            writer.add(np.array([0, last - 1 + beyond], "<u4"))
        if beyond:
            with pytest.raises(StagedLost, match="beyond its memory"):
                list(files.open_targets())
        else:
            assert [targets.tolist() for targets in files.open_targets()] == [[base, 97]]


def test_an_array_file_whose_writing_failed_is_no_array_file(tmp_path: Path) -> None:
    def fails() -> None:
        with ArrayWriter(tmp_path / "new") as writer:
            writer.add(np.arange(3, dtype="<u2"))
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fails()
    with pytest.raises(StagedLost):
        ArrayReader(tmp_path / "new", [6])
