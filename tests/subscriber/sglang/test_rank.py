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
from subscriber.sglang.wire import Order, Piece, RankFiles, file_hash
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
        self.gone: list[str] = []
        self.running = 0
        self.shown: list[str] = []
        self.cached = True

    def describe(self) -> Ack:
        return {}

    def refusals(self) -> list[str]:
        return []

    def vote(self, ack: Ack) -> list[Ack]:
        return [ack, {**self.other(ack), "rank": 1}]

    def released(self) -> list[str]:
        return self.gone

    def idle(self) -> bool:
        return not self.running

    def stop_batches(self) -> None:
        self.running = 0

    def disown(self) -> Ack:
        self.shown.append("unknown")
        return {}

    def wrote(self, version: str) -> None:
        self.shown.append(version)

    def drop_cache(self) -> None:
        if self.running:
            raise RuntimeError("requests are running")
        self.cached = False


class Served:
    """A mapped rank, and a subscriber's requests to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, FakeHost()
        self.rank = Rank(self.host)
        self.maps: list[str] = []
        data = self.map_again()
        self.map, self.maps = BoxMap.from_bytes(data, CATALOG), [file_hash(data)]

    def map_again(self, catalog: Catalog = CATALOG) -> bytes:
        (self.folder / "catalog").write_bytes(catalog.data)
        self.ask("map", catalog=file_hash(catalog.data))
        return (self.folder / "0.map").read_bytes()

    def ask(self, op: str, **fields: Any) -> Ack:
        """This rank's acknowledgement, which must be a success."""
        ack = self.try_ask(op, **fields)
        assert ack["ok"], ack
        return ack

    def try_ask(self, op: str, **fields: Any) -> Ack:
        common = {"directory": str(self.folder), "maps": self.maps}
        return self.rank.handle({"op": op, **common, **fields})[0]

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


@pytest.mark.parametrize("gone", ["weights", "kv_cache"])
def test_released_memory_is_not_touched(gone: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anything run that would need it: colocated trainers give back first the weights and then the rest."""
    served.load("an-order", 5.0)
    served.ask("hold", reason="a test")
    served.host.gone = [gone]
    for name in ("gather", "write", "holds", "digest"):
        monkeypatch.setattr(live, name, lambda *_: pytest.fail("it touches what is not there"))
    served.ask("digest", name="it")
    acks = [
        served.ended("digest it"),
        served.try_ask("scatter", name="an-order", repair=True),
        served.try_ask("map", catalog=file_hash(CATALOG.data)),
        served.release(),
    ]
    assert [ack["kind"] for ack in acks] == ["engine_failed"] * 4
    assert gone in acks[0]["error"]
    assert "/resume_memory_occupation" in acks[0]["hint"]
    assert served.rank.gate == "a test"


def test_what_is_cached_of_other_weights_is_dropped_before_anything_runs(served: Served) -> None:
    """Somebody wrote, served, and put the very same weights back: they are right, and what is cached is not."""
    assert served.release()["ok"]
    assert served.host.cached  # it comes from these weights alone
    served.rank.somebody_writes()
    served.host.running = 1
    served.host.other = lambda ack: {**ack, "ok": False}
    served.release()
    assert served.host.cached  # as on the other rank
    served.host.other = lambda ack: ack
    assert served.release()["ok"]
    assert not served.host.cached
    served.host.cached = True
    assert served.release()["ok"]
    assert served.host.cached


def test_a_cache_that_cannot_be_dropped_keeps_the_gate_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.rank.somebody_writes()
    served.ask("hold", reason="a test")
    monkeypatch.setattr(FakeHost, "stop_batches", lambda host: None)
    served.host.running = 1
    assert not served.release()["ok"]
    assert served.rank.gate == "a test"


def test_another_catalog_does_not_take_the_place_of_the_one_that_is_followed(served: Served) -> None:
    """`deltasync smoke` of another stream, at any moment."""
    served.load("an-order", 5.0)
    served.map_again(Catalog.of(list(CATALOG.tensors), {"tied": "a"}))
    assert served.ask("scatter", name="an-order", repair=False)["ok"]
    assert served.release()["ok"]
    served.ask("digest", name="it")
    assert served.ended("digest it")["ok"]


def test_an_order_for_places_that_may_have_moved_is_not_written(served: Served) -> None:
    served.load("an-order", 5.0)
    served.rank.somebody_writes()
    served.map_again()
    assert served.try_ask("scatter", name="an-order", repair=True)["kind"] == "staged_lost"


def test_ranks_open_the_gate_together_or_not_at_all(served: Served) -> None:
    """One that ran while another is held would wait for it for ever."""
    served.ask("hold", reason="a test")
    served.host.other = lambda ack: {**ack, "ok": False}
    served.release()
    assert served.rank.gate == "a test"
    served.host.other = lambda ack: ack
    assert served.release()["ok"]
    assert served.rank.gate is None


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


@pytest.mark.parametrize("first", ["the label", "the write"])
def test_a_version_that_was_shown_and_is_not_there_any_more_is_taken_back(first: str, served: Served) -> None:
    """A subscriber shows a version, then has it released; somebody writes before one of the two, without a pause."""
    tokens = [served.rank.writes] * 2
    steps = [served.rank.named, served.rank.somebody_writes]
    for step in steps if first == "the label" else reversed(steps):
        step()
    if first == "the label":  # a subscriber may die here, and nobody else would take it back
        assert served.host.shown == ["unknown"]
    assert served.try_ask("release", tokens=tokens, version=1)["kind"] == "engine_changed"
    assert served.host.shown == ["unknown"]


def test_the_version_that_a_writer_names_stays(served: Served) -> None:
    """SGLang's writers name it at the end of what may be several writes, which are not ours to take back."""
    tokens = [served.rank.writes] * 2
    served.rank.named()
    served.rank.somebody_writes()
    served.host.shown.append("theirs")
    served.rank.somebody_writes()
    served.try_ask("release", tokens=tokens, version=1)
    assert served.host.shown == ["unknown", "theirs"]


def test_a_server_that_nobody_updates_keeps_whatever_it_is_called(tmp_path: Path) -> None:
    host = FakeHost()
    rank = Rank(host)
    rank.named()
    rank.somebody_writes()
    assert host.shown == []


def test_all_ranks_take_back_a_version_that_one_has_not(served: Served) -> None:
    served.rank.named()
    served.host.other = lambda ack: {**ack, "ok": False, "writes": ack["writes"] + 1}
    assert served.release()["ok"]  # of this one
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
