"""What one rank refuses before it writes or serves: other maps, other bits, other memory, other weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from subscriber.sglang import live
from subscriber.sglang.rank import Rank
from subscriber.sglang.wire import Piece, file_hash
from tests.subscriber.sglang.test_rank import CATALOG, FakeHost, Served


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def test_an_order_for_another_map_is_refused(served: Served) -> None:
    served.map = replace(served.map, boxes=served.map.boxes[:1])
    served.ask("gather", **served.order("it", 0, 5.0))
    assert served.ended("gather it")["kind"] == "staged_lost"


def test_bits_that_nobody_admits_to_have_written_stop_an_update_but_no_repair(served: Served) -> None:
    """They are compared one by one before the first write, for not everybody who writes is counted."""
    served.load("it", 5.0)
    weight = served.host.model.get_parameter("a")
    weight[3] = 9.0
    ack = served.try_ask("scatter", name="it", repair=False)
    assert (ack["ok"], ack["kind"], "began" in ack) == (False, "engine_changed", False)
    assert weight.tolist() == [0, 1, 2, 9, 4, 5, 6, 7]
    assert served.try_ask("scatter", name="it", repair=True)["ok"]
    assert weight.tolist() == [5.0] * 8


def test_an_update_is_not_written_once_somebody_has_written_since_it_was_gathered(served: Served) -> None:
    served.load("it", 5.0)
    served.rank.somebody_writes()
    ack = served.try_ask("scatter", name="it", repair=False)
    assert (ack["ok"], ack["kind"], "began" in ack) == (False, "engine_changed", False)


def test_a_version_is_not_released_once_somebody_has_written_since(served: Served) -> None:
    served.ask("hold", reason="a test")
    tokens = [served.rank.writes] * 2
    served.rank.somebody_writes()
    ack = served.try_ask("release", tokens=tokens, version=1)
    assert (ack["ok"], ack["kind"]) == (False, "engine_changed")
    assert served.rank.gate == "a test"
    assert served.release()["ok"]


def test_memory_that_does_not_hold_what_was_written_stays_held_until_it_does(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.load("it", 5.0)
    monkeypatch.setattr(live, "write", lambda *_: False)
    ack = served.try_ask("scatter", name="it", repair=False)
    assert (ack["ok"], ack["kind"], ack["began"]) == (False, "engine_mismatch", True)
    assert served.rank.hello()["unfinished"] == "it"
    assert not served.release()["ok"]
    assert served.rank.gate is not None
    monkeypatch.undo()
    assert served.try_ask("scatter", name="it", repair=True)["ok"]
    assert served.release()["ok"]
    assert served.rank.hello()["gate"] is None
    assert served.host.shown == ["1"]


def test_two_values_for_one_place_are_no_write() -> None:
    memory, piece, values = torch.zeros(8, dtype=torch.int16), Piece(0, 1, 0, 2), np.array([1, 2], np.uint16)
    assert live.write(memory, piece, live.cut(piece, np.array([3, 4]), values, on_host=True))
    assert not live.write(memory, piece, live.cut(piece, np.array([3, 3]), values, on_host=True))


def test_a_tensor_that_was_replaced_is_not_written_until_it_is_mapped_again(served: Served) -> None:
    served.load("it", 5.0)
    model = served.host.model
    model.register_parameter("a", nn.Parameter(torch.zeros(8).bfloat16(), requires_grad=False))
    ack = served.try_ask("scatter", name="it", repair=True)
    assert (ack["ok"], ack["kind"], "began" in ack) == (False, "engine_changed", False)
    served.rank.somebody_writes()  # whoever replaced it
    served.map_again()
    served.load("again", 5.0)
    assert served.try_ask("scatter", name="again", repair=False)["ok"]
    assert model.get_parameter("a").tolist() == [5.0] * 8


@pytest.mark.parametrize("why", ["a weight that no version has", "a server that is refused"])
def test_what_cannot_be_kept_at_a_version_is_not_mapped(
    why: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost()
    if why == "a server that is refused":
        monkeypatch.setattr(host, "refusals", lambda: ["quantized layers"])
    else:
        host.model.register_parameter("c", nn.Parameter(torch.ones(4).bfloat16(), requires_grad=False))
    served.host, served.rank = host, Rank(host)
    ack = served.try_ask("map", catalog=file_hash(CATALOG.data))
    assert (ack["ok"], ack["kind"]) == (False, "engine_mismatch")
    assert ("quantized" if why == "a server that is refused" else "'c'") in ack["error"]
