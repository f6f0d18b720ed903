"""Several threads write one order: the same memory as from one thread, and the same after a failure."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from subscriber.sglang import live, rank
from subscriber.sglang.wire import Order, Piece, RankFiles, file_hash
from tests.subscriber.parts import TIMEOUT, live_bits
from tests.subscriber.sglang.test_rank import Served

RUNS = (Piece(0, 1, 0, 3), Piece(0, 2, 3, 2), Piece(1, 1, 0, 1), Piece(1, 3, 1, 2), Piece(0, 1, 7, 1))
TARGETS = ((2, 0, 1), (5, 3), (0,), (4, 1), (7,))
"""As elements of their memory; together every element of both memories but the last of the second."""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(rank, "lanes", lambda: 3)
    monkeypatch.setattr(live, "_BLOCK", 2)
    return Served(tmp_path)


def staged(served: Served) -> dict[str, Any]:
    """An order of many pieces, gathered and loaded; and what the memories hold once it is written."""
    files = RankFiles(served.folder, 0, Order(file_hash(served.map.to_bytes()), RUNS), served.map.memories)
    bits = live_bits(torch.arange(100, 100 + sum(piece.elements for piece in RUNS)).bfloat16())
    with files.writer("targets") as targets, files.writer("new") as new:
        for piece, starts in zip(RUNS, TARGETS, strict=True):
            targets.add(np.array(starts, np.int64).astype("<u4") - np.uint32(piece.base))
            new.add(bits[: piece.elements])
            bits = bits[piece.elements :]
    fields = {"name": "it", "orders": [files.write_order()]}
    served.ask("gather", **fields)
    assert served.ended("gather it")["ok"]
    served.ask("load", gathered=True, version=1, **fields)
    assert served.ended("load it")["ok"]
    return fields


def values(served: Served) -> list[list[float]]:
    return [served.host.model.get_parameter(name).tolist() for name in ("a", "b")]


WRITTEN = [
    [101, 102, 100, 105, 106, 103, 104, 114],
    [107, 111, 112, 113, 108, 109, 110, 7],
]


@pytest.mark.parametrize("in_memory", [True, False])
def test_threads_write_what_one_would(
    in_memory: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_memory:
        monkeypatch.setattr("subscriber.sglang.job._IN_MEMORY", 0)
    staged(served)
    writers = set[int]()
    original, together = live.write, threading.Barrier(3, timeout=TIMEOUT)

    def write(*args: Any) -> bool:
        if threading.get_ident() not in writers:
            writers.add(threading.get_ident())
            together.wait()
        return original(*args)

    monkeypatch.setattr(live, "write", write)
    ack = served.ask("scatter", name="it", repair=False)
    assert values(served) == WRITTEN
    assert len(writers) == 3
    assert ack["cpu_seconds"] > 0


@pytest.mark.parametrize("after", range(5))
def test_a_failure_in_any_of_them_stops_all_and_a_repeat_heals(
    after: int, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged(served)
    calls, counting, original = list[int](), threading.Lock(), live.write

    def write(*args: Any) -> bool:
        with counting:
            calls.append(0)
            turn = len(calls) - 1
        if turn == after:
            raise OSError("fails because a test wants it")
        return original(*args)

    threads = threading.active_count()
    monkeypatch.setattr(live, "write", write)
    ack = served.try_ask("scatter", name="it", repair=False)
    assert (ack["ok"], ack["kind"], ack["began"]) == (False, "engine_failed", True)
    assert threading.active_count() == threads
    assert served.rank.hello()["unfinished"] == "it"
    assert not served.release()["ok"]
    monkeypatch.setattr(live, "write", original)
    served.ask("scatter", name="it", repair=True)
    assert values(served) == WRITTEN
    assert served.release()["ok"]


@pytest.mark.parametrize("piece", range(5))
def test_a_difference_in_any_piece_is_seen_before_the_first_write(piece: int, served: Served) -> None:
    staged(served)
    number, place = RUNS[piece].memory, TARGETS[piece][-1] + RUNS[piece].run - 1
    weight = served.host.model.get_parameter(("a", "b")[number])
    weight[place] = 99.0
    before = values(served)
    ack = served.try_ask("scatter", name="it", repair=False)
    assert (ack["ok"], ack["kind"], "began" in ack) == (False, "engine_changed", False)
    assert values(served) == before


def test_a_device_is_written_by_one_thread_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small kernels would cost more than they save. No device is at hand: the rank only believes it has one."""
    served.map_again()
    traced = served.rank._maps.named(served.maps[0])
    monkeypatch.setattr(traced.live, "on_host", False)
    staged(served)
    sizes, caller = list[int](), threading.get_ident()
    original = live.write

    def write(memory: torch.Tensor, piece: Piece, blocks: list[live.Block]) -> bool:
        assert threading.get_ident() == caller
        sizes.append(len(blocks))
        return original(memory, piece, blocks)

    monkeypatch.setattr(live, "write", write)
    served.ask("scatter", name="it", repair=False)
    assert sizes == [1] * 5
    assert values(served) == WRITTEN
