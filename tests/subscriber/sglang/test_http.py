"""Whatever a server, the way to it or a key does is a typed error of that server, and shows no key."""

import asyncio
import gzip
import json
import os
import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from subscriber.config import ServerConfig, SGLangEngineConfig, unsendable
from subscriber.errors import EngineDenied, EngineFailed, EngineMismatch, SubscriberError
from subscriber.sglang import http
from subscriber.sglang.client import Client
from subscriber.sglang.wire import PROTOCOL
from tests.support.scripted import Reply, Request, ScriptedServer

PAUSED = Reply(body=json.dumps({"message": "Generation paused successfully.", "status": "ok"}).encode())


def client_of(url: str, **changes: object) -> Client:
    config = SGLangEngineConfig.model_validate({"type": "sglang", "servers": [{"url": url}]} | changes)
    return Client(config, config.servers[0])


async def pause(client: Client) -> None:
    try:
        await client.pause()
    finally:
        await client.close()


def refused(url: str, **changes: object) -> SubscriberError:
    """What a pause raises."""
    with pytest.raises(SubscriberError) as caught:
        asyncio.run(pause(client_of(url, **changes)))
    return caught.value


def told(error: BaseException) -> str:
    """All that anybody is shown of it, a traceback included."""
    return "".join(traceback.format_exception(error)) + str(error)


@contextmanager
def speaking(words: bytes) -> Iterator[int]:
    """A port that answers whoever connects with `words`, and no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(words)
                    connection.recv(1 << 16)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


UNSENDABLE = {
    "empty": (b"", "is empty"),
    "white": (b" \n", "is empty"),
    "lines": (b"sesame1\nsesame2\n", "has several lines"),
    "returns": (b"sesame1\r\nsesame2", "has several lines"),
    "mark": (b"\xef\xbb\xbfsesame\n", "begins with a byte order mark"),
    "umlaut": ("schlüssel-sesame\n".encode(), "has characters that are not ASCII"),
    "utf-16": ("sesame\n".encode("utf-16"), "has characters that are not ASCII"),
    "binary": (b"\0sesame\1", "has control characters"),
    "separator": ("sesame1\u2028sesame2".encode(), "has characters that are not ASCII"),
    "long": (b"sesame" * 1000, "cannot be read: it is longer than 4096 bytes"),
}


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
@pytest.mark.parametrize("form", UNSENDABLE)
def test_a_key_file_that_cannot_be_sent_is_named_and_not_shown(name: str, form: str, tmp_path: Path) -> None:
    data, why = UNSENDABLE[form]
    file = tmp_path / "key"
    file.write_bytes(data)
    with ScriptedServer(lambda _: PAUSED) as server:
        error = refused(server.url, **{f"{name}_file": file})
        assert not server.requests
    assert isinstance(error, EngineDenied)
    assert f"engine.{name}_file: {file} {why}" in error.message
    assert "sesame" not in told(error)
    assert "start the server" not in error.hint


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it, and nobody waits for that
    for file, why in ((tmp_path, "Is a directory"), (tmp_path / "pipe", "it is no regular file")):
        assert f"{file} cannot be read: {why}" in refused("http://127.0.0.1:1", api_key_file=file).message
    missing = refused("http://127.0.0.1:1", api_key_file=tmp_path / "none")
    assert f"{tmp_path / 'none'} cannot be read: No such file" in missing.message


def test_a_rotated_key_is_read_for_the_next_request(tmp_path: Path) -> None:
    file = tmp_path / "key"

    async def rotate() -> None:
        client = client_of(server.url, admin_api_key_file=file, api_key="plain")
        for data in (b"first\n", b"", b"two\nlines", b"  second  \n"):
            file.write_bytes(data)
            try:
                await client.pause()
            except EngineDenied:
                assert data in (b"", b"two\nlines")
        await client.close()

    with ScriptedServer(lambda _: PAUSED) as server:
        asyncio.run(rotate())
        assert [r.headers["Authorization"] for r in server.requests] == ["Bearer first", "Bearer second"]


@pytest.fixture(scope="module")
def pausing() -> Iterator[ScriptedServer]:
    with ScriptedServer(lambda _: PAUSED) as running:
        yield running


SECRET = "sesame"


@given(key=st.one_of(st.text(), st.text(st.characters(codec="ascii"))))
@example(key="a b")
@example(key=" a")
@example(key="a\x7f")
def test_a_key_either_arrives_as_it_is_or_is_refused_with_the_config(
    pausing: ScriptedServer, key: str
) -> None:
    if unsendable(key) is None:
        asyncio.run(pause(client_of(pausing.url, api_key=key)))
        assert pausing.requests[-1].headers["Authorization"] == f"Bearer {key}"
    else:
        with pytest.raises(ValidationError) as caught:
            client_of(pausing.url, api_key=f"{key}{SECRET}\n")
        assert SECRET not in told(caught.value)


@given(
    host=st.one_of(
        st.from_regex(r"[a-z0-9_.-]{1,8}", fullmatch=True),
        st.ip_addresses().map(lambda ip: f"[{ip}]" if ip.version == 6 else str(ip)),
        st.text(max_size=6),
    ),
    port=st.one_of(st.integers(-1, 70000).map(str), st.text(max_size=4)),
)
@example(host="xn--", port="1")
@example(host="[1.2.3.4]", port="1")
@example(host="a" * 64, port="1")
def test_a_url_is_refused_with_the_config_or_can_be_asked(host: str, port: str) -> None:
    try:
        server = ServerConfig(url=f"https://{host}:{port}/")
    except ValidationError:
        return
    asked = httpx.URL(server.url)
    assert asked.raw_host.decode() == host.strip("[]").lower()
    assert asked.port == (None if int(port) == 443 else int(port))


def test_nobody_listens() -> None:
    assert refused("http://127.0.0.1:1").hint.startswith("start the server")


def test_a_name_that_nobody_knows() -> None:
    error = refused("http://nowhere.invalid:30000")
    assert isinstance(error, EngineFailed)
    assert "cannot resolve the name" in error.hint


@pytest.mark.parametrize("host", ["xn--", "xn--zz"])
def test_a_name_that_is_none(host: str) -> None:
    assert "url" in refused(f"http://{host}:30000").hint


def test_no_tls_is_spoken_there() -> None:
    with ScriptedServer(lambda _: PAUSED) as server:
        error = refused(server.url.replace("http:", "https:"))
    assert "http:// unless the server itself speaks TLS" in error.hint


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH\r\n", b"\x15\x03\x01\x00\x02\x02\x46", b""])
def test_no_http_is_spoken_there(words: bytes) -> None:
    with speaking(words) as port:
        error = refused(f"http://127.0.0.1:{port}")
    assert isinstance(error, EngineFailed)
    assert "start the server" not in error.hint
    assert "log" in error.hint


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            Reply(501, b"<html>\x1b[2J Unsupported method</html>", {"Content-Type": "text/html"}),
            "HTTP 501: 36 bytes of text/html",
        ),
        (
            Reply(200, b"<html>welcome</html>", {"Content-Type": "text/html;charset=hex"}),
            "bytes of text/html",
        ),
        (Reply(200, b"[" * 100_000), "HTTP 200: 100000 bytes of no Content-Type"),
        (Reply(200, b'{"status": "ok"}'), "HTTP 200: {'status': 'ok'}"),
        (Reply(200, b'{"success": false, "message": "busy\\u001b[2J"}'), "HTTP 200: busy [2J"),
        (Reply(404, b'{"detail": "Not Found"}'), "HTTP 404: Not Found"),
        (Reply(308, headers={"Location": "https://elsewhere.invalid/"}), "HTTP 308: 0 bytes"),
        (Reply(500, b'"' + b"x" * 10_000 + b'"'), "HTTP 500: xxx"),
        (Reply(200, b"no gzip", {"Content-Encoding": "gzip"}), "gave no answer"),
        (Reply(200, b"{}", announce=100), "gave no answer"),
        (Reply(0), "gave no answer"),
    ],
)
def test_an_answer_of_something_else_is_told_in_a_few_words(reply: Reply, said: str) -> None:
    with ScriptedServer(lambda _: reply) as server:
        error = refused(server.url)
    assert isinstance(error, EngineFailed)
    assert said in error.message
    assert len(error.message) < 800
    assert error.message.isprintable()
    assert "start the server" not in error.hint


def test_the_key_is_taken_out_of_what_a_service_repeats() -> None:
    def repeats(request: Request) -> Reply:
        return Reply(400, json.dumps({"error": f"odd headers: {dict(request.headers)}"}).encode())

    with ScriptedServer(repeats) as server:
        error = refused(server.url, api_key="open sesame")
    assert "odd headers: " in error.message
    assert "sesame" not in told(error)


@pytest.mark.parametrize("packed", [True, False])
def test_an_answer_without_end_is_not_taken_into_memory(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_MAX_ANSWER", 1000)
    data = b" " * 100_000
    reply = Reply(200, gzip.compress(data), {"Content-Encoding": "gzip"}) if packed else Reply(200, data)
    with ScriptedServer(lambda _: reply) as server:
        assert "answers more than 1000 bytes" in refused(server.url).message


def test_an_answer_has_to_be_whole_in_time() -> None:
    """Not merely to go on: a byte now and then would be waited for without end."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while not stop.wait(0.01):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        error = refused(f"http://127.0.0.1:{listener.getsockname()[1]}", pause_timeout=0.3)
        stop.set()
        thread.join()
    assert "no answer in time" in error.message


GOOD = {"rank": 0, "boot": "life", "ok": True, "protocol": PROTOCOL, "writes": 0, "version": None}


@pytest.mark.parametrize(
    "message",
    [
        "Model weights are fine",
        "[1]",
        '["rank"]',
        '[{"rank": 0}]',
        "[" * 100_000,
        json.dumps([GOOD | {"rank": float("inf")}]),
        json.dumps([GOOD | {"rank": "0"}]),
        json.dumps([GOOD | {"ok": False}]),
        json.dumps([GOOD | {"ok": False, "kind": [], "error": "", "hint": ""}]),
        json.dumps([{name: value for name, value in GOOD.items() if name != "protocol"}]),
        json.dumps([GOOD | {"protocol": []}]),
        None,
        7,
    ],
)
def test_what_no_plugin_of_ours_answers_is_said_to_be_none(message: object) -> None:
    body = json.dumps({"success": True, "message": message}).encode()
    with ScriptedServer(lambda _: Reply(body=body)) as server, pytest.raises((EngineMismatch, EngineFailed)):
        asyncio.run(client_of(server.url).hello())
