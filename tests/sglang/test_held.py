"""A server as operators run it, with overlapping batches and grammars, that is held while strangers go on using it."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deltasync.demo.sglang_server import SglangOptions, SglangServer
from subscriber.sglang.client import Client
from subscriber.sglang.engine import SGLangEngine
from tests.sglang import oracle
from tests.sglang.conftest import SGLANG_PYTHON, Served, reset, with_faults
from tests.sglang.oracle import Stream
from tests.sglang.training import Follower, equals_export, training
from tests.sglang.watcher import versions_of
from tests.subscriber.parts import until
from tests.support.tiny_models import VOCABULARY

LONG: Final = 1800
"""Tokens of a request that outlasts what is done meanwhile."""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def usual_server(
    dense_checkpoint: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    folder = tmp_path_factory.mktemp("usual")
    words = {"<end>": 0} | {chr(i + 32): i for i in range(1, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)
    options = SglangOptions(
        python=SGLANG_PYTHON,
        model=dense_checkpoint,
        tokenizer=folder,
        overlap=True,
        flags=("--grammar-backend", "xgrammar", "--log-requests", "--context-length", "2048"),
        **with_faults(faults),
    )
    with SglangServer(options, folder / "server.log") as server:
        yield server.wait_ready()


@pytest.fixture
def served(usual_server: SglangServer, dense_checkpoint: Path, faults: Path) -> Served:
    for path in faults.iterdir():
        path.unlink()
    return reset(usual_server, dense_checkpoint)


def hold(server: SglangServer) -> None:
    """As a subscriber does that finds no version of its stream."""
    action = "deltasync:" + json.dumps({"op": "hold", "reason": "somebody holds it"})
    assert oracle.post(server, "/weights_checker", action=action)["success"]


def hello(server: SglangServer) -> Any:
    """What the first rank says of itself."""
    return json.loads(oracle.post(server, "/weights_checker", action='deltasync:{"op": "hello"}')["message"])[
        0
    ]


def spoil(server: SglangServer) -> None:
    """Write over all weights, whatever is going on."""
    oracle.post(server, "/weights_checker", action="reset_tensors")


class Ask:
    """A request for an object of JSON with the field `name`, on a thread."""

    def __init__(self, server: SglangServer, name: str) -> None:
        self.meta: dict[str, Any] = {}
        self._schema = json.dumps({"type": "object", "properties": {name: {"type": "string"}}})
        self._server = server
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        sampling = {"max_new_tokens": 8, "json_schema": self._schema}
        with self._server.client(120) as client:
            answer = client.post("/generate", json={"text": "{", "sampling_params": sampling})
        assert answer.status_code == httpx.codes.OK
        self.meta = answer.json()["meta_info"]

    def result(self) -> dict[str, Any]:
        self._thread.join(120)
        return self.meta


def test_running_requests_go_on_while_batches_overlap(served: Served, tmp_path: Path) -> None:
    server = served.server
    with training(served.checkpoint, tmp_path) as trainer:
        with Follower(server.url, trainer) as follower:
            follower.reach(trainer.publish())
            version = follower.prepare(trainer)
            with Stream(server, tokens=LONG) as stream:
                stream.wait_for(10)
                follower.reach(version)
            assert versions_of(stream.meta) == ("1", "2")
            assert len(stream.ids) == LONG
        equals_export(server, trainer)


@pytest.mark.parametrize("held", [True, False])
def test_a_request_that_waits_for_its_grammar_holds_nothing_up(
    held: bool, served: Served, faults: Path, tmp_path: Path
) -> None:
    """Compiling one may take many seconds. To SGLang the server is not idle meanwhile, and flushes nothing."""
    server = served.server
    with training(served.checkpoint, tmp_path) as trainer, Follower(server.url, trainer) as follower:
        follower.reach(trainer.publish())
        (faults / "0.grammar").write_text("wait")
        if held:
            hold(server)
            spoil(server)
            oracle.continue_generation(server)
        ask = Ask(server, f"field-{held}")
        until(lambda: (faults / "0.grammar.reached").exists())
        follower.reach(trainer.publish())
        until(lambda: follower.subscriber.report.ready)
        assert ask.meta == {}
        (faults / "go").touch()
        assert versions_of(ask.result()) == ("2",)
        equals_export(server, trainer)


def test_what_somebody_elses_weights_left_in_the_cache_is_not_used(served: Served, tmp_path: Path) -> None:
    """They served, and then put the version's own weights back, without a flush: nothing is left to write."""
    server = served.server
    with training(served.checkpoint, tmp_path, lr=0.01) as trainer:
        with Follower(server.url, trainer) as follower:
            follower.reach(trainer.publish())
        with Stream(server, tokens=16) as own:
            pass
        oracle.load_from_disk(server, served.checkpoint)
        with Stream(server, tokens=16) as other:
            pass
        oracle.load_from_disk(server, trainer.export(1), flush_cache=False)
        with Follower(server.url, trainer) as follower:
            follower.reach(1)
        with Stream(server, tokens=16) as again:
            pass
        assert again.meta["cached_tokens"] == 0
        assert again.ids == own.ids != other.ids


def test_a_server_that_somebody_has_paused_is_not_ready(served: Served, tmp_path: Path) -> None:
    with training(served.checkpoint, tmp_path) as trainer, Follower(served.server.url, trainer) as follower:
        follower.reach(trainer.publish())
        report = follower.subscriber.report
        oracle.post(served.server, "/pause_generation", mode="in_place")
        until(lambda: not report.ready)
        assert "/continue_generation" in (report.reason or "")
        oracle.continue_generation(served.server)
        until(lambda: report.ready)
        assert (
            report.metrics.errors.labels("engine_changed")._value.get() == 0
        )  # nothing is digested for that


def test_nothing_runs_while_a_part_of_the_memory_is_released(served: Served, tmp_path: Path) -> None:
    """A colocated trainer takes back the weights' memory first, and the cache's when it has been written."""
    server = served.server
    with training(served.checkpoint, tmp_path) as trainer, Follower(server.url, trainer) as follower:
        follower.reach(trainer.publish())

        def said() -> str:
            error = follower.subscriber.report.status().last_error
            return "" if error is None else error.message

        oracle.post(server, "/pause_generation", mode="retract")
        oracle.post(server, "/release_memory_occupation", tags=["kv_cache", "weights"])
        until(lambda: "released: kv_cache, weights" in said())
        oracle.post(server, "/resume_memory_occupation", tags=["weights"])
        trainer.publish()
        until(lambda: said().endswith("released: kv_cache"))
        assert hello(server)["paused"]
        oracle.post(server, "/resume_memory_occupation", tags=["kv_cache"])
        follower.reach(2)
        equals_export(server, trainer)


@pytest.mark.parametrize("pause", ["retract", "abort"])
def test_a_server_that_was_held_with_a_batch_at_hand(pause: str, served: Served, tmp_path: Path) -> None:
    server = served.server
    with training(served.checkpoint, tmp_path) as trainer:
        trainer.publish()
        with Stream(server, tokens=LONG) as stream:
            stream.wait_for(5)
            hold(server)
            spoil(server)
            with Follower(server.url, trainer, pause=pause, pause_timeout=5.0) as follower:
                follower.reach(1)
        equals_export(server, trainer)


def test_tokens_of_somebody_elses_weights_do_not_go_by_our_version(served: Served, tmp_path: Path) -> None:
    """The writer names no version, and what it wrote is replaced by the very version that was there before."""
    server = served.server
    with training(served.checkpoint, tmp_path) as trainer, Follower(server.url, trainer) as follower:
        follower.reach(trainer.publish())
        with Stream(server, tokens=LONG) as stream:
            stream.wait_for(10)
            spoil(server)
        assert versions_of(stream.meta) == ("1", "unknown", "1")
        follower.reach(1)
        assert oracle.info(server, "/model_info")["weight_version"] == "1"


@pytest.mark.parametrize("first", ["the version is named", "somebody writes"])
def test_a_version_named_just_before_its_release_does_not_stay_over_other_weights(
    first: str, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscriber recognises version 0 in a server that serves all the while; it looks again only a poll later."""
    server, show, held = served.server, Client.show_version, SGLangEngine.hold

    async def show_version(client: Client, version: int) -> None:
        monkeypatch.setattr(Client, "show_version", show)
        if first == "somebody writes":
            spoil(server)
        await show(client, version)
        if first == "the version is named":
            spoil(server)

    async def hold_later(engine: SGLangEngine, reason: str) -> None:
        monkeypatch.setattr(SGLangEngine, "hold", held)
        await asyncio.to_thread(stream.wait_for, len(stream.ids) + 3)
        await held(engine, reason)

    monkeypatch.setattr(Client, "show_version", show_version)
    monkeypatch.setattr(SGLangEngine, "hold", hold_later)
    with training(served.checkpoint, tmp_path) as trainer, Stream(server, tokens=LONG) as stream:
        stream.wait_for(3)
        with Follower(server.url, trainer) as follower:
            follower.reach(0)
            stream.wait_for(len(stream.ids) + 3)
    assert versions_of(stream.meta)[-2:] == ("unknown", "0")


def test_a_server_that_somebody_else_holds_is_not_ready(served: Served, tmp_path: Path) -> None:
    """And is released, since it is found to be at its version still."""
    with training(served.checkpoint, tmp_path) as trainer, Follower(served.server.url, trainer) as follower:
        follower.reach(trainer.publish())
        report = follower.subscriber.report
        hold(served.server)
        until(lambda: not report.ready)
        until(lambda: report.ready)
        assert len(oracle.logprobs(served.server)) > 0
        assert follower.applied[-1].version == 1
