"""Talking to a server: what counts as an answer, and whom it is asked."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from subscriber.config import ServerConfig, SGLangEngineConfig
from subscriber.errors import EngineDenied, EngineFailed
from subscriber.sglang.client import Client
from subscriber.sglang.wire import PROTOCOL
from tests.support.scripted import Reply, Request, ScriptedServer

ACK = {"rank": 0, "boot": "life", "ok": True, "protocol": PROTOCOL}


def greets(request: Request) -> Reply:
    message = json.dumps([ACK])
    return Reply(body=json.dumps({"success": True, "message": message}).encode())


@contextmanager
def client_of(url: str) -> Iterator[Client]:
    server = ServerConfig(url=url)
    yield Client(SGLangEngineConfig(type="sglang", servers=(server,)), server)


def test_a_proxy_for_the_rest_of_the_world_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are on this host; HTTP_PROXY is there for the object store."""
    with ScriptedServer(lambda _: Reply(403)) as proxy, ScriptedServer(greets) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with client_of(server.url) as client:
            assert asyncio.run(client.hello())[0]["boot"] == "life"


@pytest.mark.parametrize("status", [302, 307, 404, 503])
def test_only_success_is_success(status: int) -> None:
    """A redirect to HTTPS has paused nothing."""
    reply = Reply(status, headers={"Location": "https://elsewhere.invalid/"})
    with (
        ScriptedServer(lambda _: reply) as server,
        client_of(server.url) as client,
        pytest.raises(EngineFailed, match=f"HTTP {status}"),
    ):
        asyncio.run(client.pause())


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_named(status: int) -> None:
    with (
        ScriptedServer(lambda _: Reply(status)) as server,
        client_of(server.url) as client,
        pytest.raises(EngineDenied) as caught,
    ):
        asyncio.run(client.hello())
    assert "admin_api_key" in caught.value.hint
