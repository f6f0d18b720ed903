"""One rank with a model and a server of the test's own: what threads, strangers and other subscribers do to it."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from chunkstore.digest import digest
from manifest.catalog import Catalog, TensorSpec
from subscriber.errors import StagingFull
from subscriber.sglang import live
from subscriber.sglang.boxes import Box, BoxMap
from subscriber.sglang.client import raise_failures
from subscriber.sglang.host import Ack
from subscriber.sglang.rank import Rank
from subscriber.sglang.wire import NOT_PAUSED, Order, Piece, RankFiles, file_hash
from tests.subscriber.parts import TIMEOUT, live_bits, until
from tests.support.disks import Limited, small_disk

CATALOG = Catalog.of([TensorSpec("a", "BF16", (8,)), TensorSpec("b", "BF16", (8,))])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b"):
            self.register_parameter(name, nn.Parameter(torch.arange(8).bfloat16(), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class FakeHost:
    """A server of two ranks, of which the other one says what `other` makes of this one's acknowledgement."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.model = Model()
        self.other: Callable[[Ack], Ack] = lambda ack: ack
        self.absent = False
        self.running = self.compiling = 0
        self.shown: list[str] = []

    def describe(self) -> Ack:
        return {}

    def refusals(self) -> list[str]:
        return []

    def vote(self, ack: Ack) -> list[Ack]:
        return [ack, {**self.other(ack), "rank": 1}]

    def memory_released(self) -> bool:
        return self.absent

    def idle(self) -> bool:
        return not self.running and not self.compiling

    def stop_batches(self) -> None:
        self.running = 0

    def settle(self) -> None:
        self.compiling = max(0, self.compiling - 1)

    def disown(self) -> Ack:
        self.shown.append("unknown")
        return {}

    def wrote(self, version: str) -> None:
        self.shown.append(version)


class Served:
    """A mapped rank, and a subscriber's requests to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, FakeHost()
        self.rank = Rank(self.host)
        (folder / "catalog").write_bytes(CATALOG.data)
        self.map = BoxMap.from_bytes(self.map_again(), CATALOG)

    def map_again(self) -> bytes:
        self.ask("map", catalog=file_hash(CATALOG.data))
        return (self.folder / "0.map").read_bytes()

    def ask(self, op: str, **fields: Any) -> Ack:
        """This rank's acknowledgement, which must be a success."""
        ack = self.try_ask(op, **fields)
        assert ack["ok"], ack
        return ack

    def try_ask(self, op: str, **fields: Any) -> Ack:
        return self.rank.handle({"op": op, "directory": str(self.folder), **fields})[0]

    def ended(self, task: str) -> Ack:
        until(lambda: bool(self.try_ask("poll", task=task)["done"]))
        return self.try_ask("poll", task=task)

    def order(self, name: str, memory: int, value: float) -> dict[str, Any]:
        """Stage an order that fills a memory with `value`. Returns the fields of the requests about it."""
        files = RankFiles(
            self.folder,
            0,
            Order(file_hash(self.map.to_bytes()), (Piece(memory, 8, 0, 1),)),
            self.map.memories,
        )
        with files.writer("targets") as writer:
            writer.add(torch.zeros(1, dtype=torch.int32).numpy().view("<u4"))
        with files.writer("new") as writer:
            writer.add(live_bits(torch.full((8,), value).bfloat16()))
        return {"name": name, "orders": [files.write_order()]}

    def load(self, name: str, value: float, version: int = 1) -> None:
        """Bring an order to the point where it can be written."""
        fields = self.order(name, 0, value)
        self.ask("gather", **fields)
        assert self.ended(f"gather {name}")["ok"]
        self.ask("load", gathered=True, version=version, **fields)
        assert self.ended(f"load {name}")["ok"]

    def release(self, version: int = 1) -> Ack:
        return self.try_ask("release", tokens=[self.rank.writes, self.rank.writes], version=version)


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


class Stop:
    """Stops whoever calls a function of `live`, until told to go on."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        original = getattr(live, name)

        def stopped(*args: Any) -> Any:
            self.reached.set()
            assert self.go.wait(TIMEOUT)
            return original(*args)

        monkeypatch.setattr(live, name, stopped)


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_read_while_somebody_writes_never_counts(
    waits: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by a thread that only begins to read once a stranger's write has begun: SGLang's own takes minutes."""
    stop = Stop("digest", monkeypatch)
    served.ask("digest", name="first")
    assert stop.reached.wait(TIMEOUT)
    if waits:  # for the first one to end
        served.ask("digest", name="second")
    writing = threading.Thread(target=served.rank.somebody_writes)
    writing.start()
    stop.go.set()
    writing.join()
    ack = served.ended("digest second" if waits else "digest first")
    assert not ack["ok"] or ack["token"] < served.rank.writes
    if ack["ok"]:
        assert not served.release()["ok"]


def test_a_full_disk_is_named_and_the_next_try_succeeds(served: Served, tmp_path: Path) -> None:
    fields = served.order("first", 0, 7.0)
    with small_disk(Limited, tmp_path / "disk") as disk:
        disk.fill()
        served.ask("gather", **fields)
        ack = served.ended("gather first")
        assert (ack["ok"], ack["kind"]) == (False, StagingFull.kind)
        assert f"{tmp_path}/0.old" in ack["error"]
        assert "staging_dir" in ack["hint"]
        with pytest.raises(StagingFull, match=r"server: reading failed: rank 0: .*0\.old"):
            raise_failures("server", "reading", [ack])
    served.load("first", 7.0)


def test_nobody_reads_any_more_when_a_write_begins(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releasing memory takes it away: whoever reads it then kills the server."""
    stop = Stop("digest", monkeypatch)
    served.ask("digest", name="it")
    assert stop.reached.wait(TIMEOUT)
    begun = threading.Event()

    def write() -> None:
        served.rank.somebody_writes()
        begun.set()

    threading.Thread(target=write, daemon=True).start()
    assert not begun.wait(0.05)
    stop.go.set()
    assert begun.wait(TIMEOUT)
    assert served.ended("digest it")["kind"] == "engine_changed"


def test_released_memory_is_not_touched(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.load("an-order", 5.0)
    served.host.absent = True
    for name in ("gather", "write", "holds", "digest"):
        monkeypatch.setattr(live, name, lambda *_: pytest.fail("it touches what is not there"))
    served.ask("digest", name="it")
    acks = [
        served.ended("digest it"),
        served.try_ask("scatter", name="an-order", repair=True),
        served.try_ask("map", catalog=file_hash(CATALOG.data)),
    ]
    assert [ack["kind"] for ack in acks] == ["engine_failed"] * 3
    assert "/resume_memory_occupation" in acks[0]["hint"]


def test_ranks_open_the_gate_together_or_not_at_all(served: Served) -> None:
    """One that ran while another is held would wait for it for ever."""
    served.ask("hold", reason="a test")
    served.host.other = lambda ack: {**ack, "ok": False}
    served.release()
    assert served.rank.gate == "a test"
    served.host.other = lambda ack: ack
    assert served.release()["ok"]
    assert served.rank.gate is None


def test_a_request_whose_grammar_is_compiled_does_not_stay_in_the_way(served: Served) -> None:
    """A paused scheduler leaves it where it is, and a flush is refused as long as it is there."""
    served.ask("hold", reason="a test")
    served.load("an-order", 5.0)
    served.host.compiling = 3
    kinds = [served.try_ask("scatter", name="an-order", repair=False).get("kind") for _ in range(3)]
    assert kinds == [NOT_PAUSED, NOT_PAUSED, None]
    assert served.release()["ok"]


def test_holding_takes_back_what_runs(served: Served) -> None:
    served.host.running = 1
    served.ask("hold", reason="a test")
    served.load("an-order", 5.0)
    served.ask("scatter", name="an-order", repair=False)
    assert served.host.shown == ["1"]


def test_somebody_elses_weights_do_not_go_by_our_version(served: Served) -> None:
    served.rank.somebody_writes()
    assert served.host.shown == []  # nothing of ours was there
    assert served.release()["ok"]
    served.rank.somebody_writes()
    served.rank.somebody_writes()
    assert served.host.shown == ["unknown"]


def test_an_order_is_written_whole_while_another_comes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two subscribers of one server: what a thread puts in its place does not reach into the writing."""
    served.load("mine", 5.0)
    holds = live.holds

    def then_another(*args: Any) -> bool:
        monkeypatch.setattr(live, "holds", holds)
        (served.folder / "other").mkdir()
        other = Served.__new__(Served)
        other.__dict__ = {**served.__dict__, "folder": served.folder / "other"}
        fields = other.order("other", 1, 7.0)
        other.ask("gather", **fields)
        assert other.ended("gather other")["ok"]
        return holds(*args)

    monkeypatch.setattr(live, "holds", then_another)
    served.ask("scatter", name="mine", repair=False)
    assert served.host.model.get_parameter("a").tolist() == [5.0] * 8
    assert served.host.model.get_parameter("b").tolist() == list(range(8))


def test_digests_are_those_of_the_map(served: Served) -> None:
    ack = (served.ask("digest", name="it"), served.ended("digest it"))[1]
    data = (served.folder / "0.digests").read_bytes()
    assert file_hash(data) == ack["hash"]
    boxes: tuple[Box, ...] = served.map.boxes
    for box, start in zip(boxes, range(0, len(data), 8), strict=True):
        name = CATALOG.tensors[box.tensor].name
        bits = live_bits(served.host.model.get_parameter(name))
        assert int.from_bytes(data[start : start + 8], "little") == digest(name, bits)
