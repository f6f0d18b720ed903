"""What one engine raises, whatever it is, is told of that engine and ends nothing for the others."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chunkstore.posix import PosixStore
from deltasync.cli import main
from subscriber.config import ServerConfig, SGLangEngineConfig
from subscriber.engine import Engine
from subscriber.errors import EngineChanged
from subscriber.fleet import Fleet
from subscriber.sglang.engine import SGLangEngine
from subscriber.sglang.wire import PROTOCOL
from tests.subscriber.parts import (
    TIMEOUT,
    RemoteEngine,
    differing,
    make_config,
    running,
    small_weights,
    until,
)
from tests.support.scripted import Reply, Request, ScriptedServer
from tests.support.streams import StreamBuilder

CALLS = ("attach", "check", "state", "prepare", "scatter", "hold", "release")


class Faulty(RemoteEngine):
    """Raises what no engine should from the calls in `faults`; `scatter` after it has written."""

    faults: tuple[str, ...] = ()


def _faulty(name: str) -> Any:
    original = getattr(RemoteEngine, name)

    async def call(self: Faulty, *args: Any) -> Any:
        result = await original(self, *args) if name == "scatter" else None
        if name in self.faults:
            raise KeyError("rank")
        return result or await original(self, *args)

    return call


for _name in CALLS:
    setattr(Faulty, _name, _faulty(_name))


class World:
    """A stream, a sound engine `a` and `b` that is not."""

    def __init__(self, folder: Path) -> None:
        self.builder = StreamBuilder(PosixStore(folder / "store"), small_weights())
        self.config = make_config(folder, self.builder)
        self.sound, self.faulty = RemoteEngine(self.builder), Faulty(self.builder)

    def fleet(self, other: Engine) -> Fleet:
        return Fleet(self.config, {"a": self.sound, "b": other})

    def holds(self, engine: RemoteEngine, version: int) -> bool:
        return not differing(engine.module, self.builder.weights[version])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def traced(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the log has the traceback of what was raised."""
    return any(record.exc_info and record.exc_info[0] is KeyError for record in caplog.records)


def last_error(fleet: Fleet) -> str:
    """What `b` tells."""
    error = fleet.reports["b"].status().last_error
    return "" if error is None else f"{error.kind}: {error.message}"


@pytest.mark.parametrize("call", CALLS)
def test_whatever_an_engine_raises_ends_nothing(
    call: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    if call in ("attach", "hold"):  # hold: what it has at first is no version
        world.builder.train()
        world.faulty.faults = (call,)
    with caplog.at_level(logging.ERROR), running(world.fleet(world.faulty)) as fleet:
        until(lambda: fleet.versions["a"] == world.builder.version)
        if call not in ("attach", "hold"):
            until(lambda: fleet.versions["b"] == 0)
            world.faulty.faults = (call,)
            if call in ("state", "release"):
                world.faulty.written = EngineChanged("somebody wrote", hint="")
            world.builder.train()

        until(lambda: traced(caplog))
        if call != "scatter":  # what it had written was found to be whole, at once
            until(lambda: "KeyError: 'rank'" in last_error(fleet))
        for _ in range(2):
            world.builder.train()
            until(lambda: world.holds(world.sound, world.builder.version))
        world.faulty.faults = ()
        fleet.wait_for(world.builder.version, TIMEOUT)
        assert world.holds(world.faulty, world.builder.version)
        until(lambda: fleet.reports["b"].status().last_error is None)
    assert any(record.message.startswith("engine_fault server=b doing=") for record in caplog.records)


ACK = {"rank": 0, "boot": "life", "ok": True, "protocol": PROTOCOL}


def message(text: str) -> Reply:
    return Reply(body=json.dumps({"success": True, "message": text}).encode())


HOSTILE = {
    "engine_failed": Reply(501, b"<html>Unsupported method</html>"),
    "engine_denied": Reply(403, b"<html>Forbidden</html>"),
    "engine_mismatch": message("Model weights are fine"),
    "engine_fault": message(json.dumps([ACK])),  # a plugin that is ours, and says less than it should
}


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> Iterator[tuple[str, ScriptedServer]]:
    def answer(_: Request) -> Reply:
        return HOSTILE[request.param]

    with ScriptedServer(answer) as server:
        yield request.param, server


def test_whatever_a_server_answers_ends_nothing(
    hostile: tuple[str, ScriptedServer], world: World, tmp_path: Path
) -> None:
    kind, answering = hostile
    server = ServerConfig(url=answering.url, name="b")
    engine = SGLangEngine(
        SGLangEngineConfig(type="sglang", servers=(server,)), server, tmp_path / "staging" / "b"
    )
    with running(world.fleet(engine)) as fleet:
        for _ in range(2):
            until(lambda: fleet.versions["a"] == world.builder.version)
            world.builder.train()
        until(lambda: last_error(fleet).startswith(f"{kind}: "))
        assert not fleet.reports["b"].ready


def test_smoke_tells_it_as_a_step(
    hostile: tuple[str, ScriptedServer], world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, answering = hostile
    file = tmp_path / "subscriber.yaml"
    settings = {
        "store": {"url": str(tmp_path / "store")},
        "state_dir": str(tmp_path / "state"),
        "engine": {"type": "sglang", "servers": [{"url": answering.url}]},
    }
    file.write_text(json.dumps(settings))
    assert main(["smoke", "--json", "-c", str(file)]) == 1
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["kind"] for step in steps if step["outcome"] == "failed"] == [kind]
