"""A proxy before an S3 server that loses, cuts, delays and invents answers, and records what the server truly said.

The record is the oracle: what a client may know is what it was truly told (`Exchange.honest`), and what happened is
what the server answered (`Exchange.answers`).
"""

import hashlib
import http.client
import math
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote, urlsplit


class Fault(Enum):
    """What becomes of one request."""

    NONE = "passed on, and the answer back"
    DELAY = "passed on late, and the answer back"
    RESET = "the connection is reset; nothing reaches the server"
    REFUSE = "answered with an error here; nothing reaches the server"
    CUT_REQUEST = "the server gets half of the body; the client's connection is closed"
    LATE = "the client's connection is reset, and then the server gets the request"
    LOSE = "the server's answer is lost: the connection is closed or reset"
    DISOWN = "the server's answer is replaced by an error"
    CUT_REPLY = "the server's answer is cut off, in its head or in its body"
    REPEAT = "sent twice, as clients and gateways below do by themselves; the second answer goes back"


HARMLESS: Final = (Fault.NONE, Fault.DELAY)
TRUTHFUL: Final = (Fault.NONE, Fault.DELAY, Fault.REPEAT)

Choose = Callable[[str, int], Fault]
"""The fault for request number n, from 0, of a client."""

CLIENT: Final = "AWS_SDK_UA_APP_ID"
"""Environment variable by which boto3 tells the proxy which client it works for."""

_ERRORS: Final = (
    (500, "InternalError"),
    (503, "ServiceUnavailable"),
    (503, "SlowDown"),
    (409, "ConditionalRequestConflict"),
    (502, ""),
    (200, "InternalError"),  # an error inside a 200, which S3 sends where it began to answer too early
)


def seeded(seed: int, rate: float) -> Choose:
    """Of every client's requests the same share `rate` fails, each in one of the ways that are faults; a tenth is late.

    Depends on seed, client and number alone, so what one client meets is the same in every run.
    """
    kinds = [fault for fault in Fault if fault not in HARMLESS]

    def choose(client: str, number: int) -> Fault:
        chance = random.Random(f"{seed}/{client}/{number}")
        if chance.random() < rate:
            return chance.choice(kinds)
        return Fault.DELAY if chance.random() < 0.1 else Fault.NONE

    return choose


@dataclass
class Exchange:
    """One request as it came in, and what became of it."""

    client: str
    number: int
    method: str
    path: str  # without the query, unquoted
    conditional: bool
    sent: str  # SHA-256 of the request's body
    fault: Fault
    answers: list[int] = field(default_factory=list)  # by the server, in its order
    held: str | None = None  # SHA-256 of the body of the server's last answer to a GET
    told: int | None = None  # the status that the client got with a whole answer
    at: float = (
        math.inf
    )  # when the client was told whatever it was told, by the monotonic clock of this machine

    @property
    def honest(self) -> bool:
        """Whether the client got what the server answered, all of it."""
        return self.told is not None and self.fault in TRUTHFUL


class FaultProxy:
    """Passes requests for `target` (http://host:port) on; `choose` picks what goes wrong. Use with `with`."""

    def __init__(self, target: str, choose: Choose) -> None:
        self.target = urlsplit(target).netloc
        self._choose = choose
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._exchanges: list[Exchange] = []
        self._late: list[threading.Thread] = []
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def record(self) -> list[Exchange]:
        """Everything so far, in the order of arrival; waits for requests that are passed on late."""
        with self._lock:
            late = list(self._late)
        for thread in late:
            thread.join()
        with self._lock:
            return list(self._exchanges)

    def count(self, client: str) -> int:
        """How many requests of `client` have come in."""
        with self._lock:
            return self._counts.get(client, 0)

    def arrived(self, client: str, method: str, path: str, conditional: bool, body: bytes) -> Exchange:
        with self._lock:
            number = self._counts.get(client, 0)
            self._counts[client] = number + 1
            fault = self._choose(client, number)
            sent = hashlib.sha256(body).hexdigest()
            exchange = Exchange(client, number, method, path, conditional, sent, fault)
            self._exchanges.append(exchange)
            return exchange

    def later(self, call: Callable[[], object]) -> None:
        thread = threading.Thread(target=call, daemon=True)
        with self._lock:
            self._late.append(thread)
        thread.start()

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)  # no FIN ahead of it: whether there is a RST is the handler's to say

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is killed while it is answered is no news."""


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        super().finish()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        client = re.search(r"app/(\S+)", self.headers.get("User-Agent", ""))
        exchange = self.proxy.arrived(
            client[1] if client else "",
            self.command,
            unquote(urlsplit(self.path).path),
            "If-None-Match" in self.headers,
            body,
        )
        chance = random.Random(f"{exchange.client}/{exchange.number}")
        match exchange.fault:
            case Fault.RESET:
                self._hang_up(reset=True)
            case Fault.REFUSE:
                self._reply(exchange, self._invented(chance))
            case Fault.CUT_REQUEST:
                self._cut_request(exchange, body)
                self._hang_up(reset=chance.random() < 0.5)
            case Fault.LATE:
                self._hang_up(reset=True)
                wait = chance.uniform(0, 0.1)
                self.proxy.later(lambda: self._pass_on_late(exchange, body, wait))
            case Fault.LOSE:
                self._pass_on(exchange, body)
                self._hang_up(reset=chance.random() < 0.5)
            case Fault.DISOWN:
                self._pass_on(exchange, body)
                self._reply(exchange, self._invented(chance))
            case Fault.CUT_REPLY:
                answer = self._pass_on(exchange, body)
                if answer is not None:
                    whole = self._bytes(answer)
                    exchange.at = time.monotonic()
                    self.connection.sendall(whole[: chance.randrange(len(whole))])
                self._hang_up(reset=chance.random() < 0.5)
            case Fault.REPEAT:
                self._pass_on(exchange, body)
                self._reply(exchange, self._pass_on(exchange, body))
            case Fault.DELAY:
                time.sleep(chance.uniform(0, 0.05))
                self._reply(exchange, self._pass_on(exchange, body))
            case Fault.NONE:
                self._reply(exchange, self._pass_on(exchange, body))

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815

    def _pass_on(self, exchange: Exchange, body: bytes) -> _Answer | None:
        """What the server answers; None if it hangs up."""
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection(self.proxy.target, timeout=60)
        try:
            return self._ask(self._upstream, exchange, body)
        except (OSError, http.client.HTTPException):
            self._upstream.close()
            return None

    def _pass_on_late(self, exchange: Exchange, body: bytes, wait: float) -> None:
        time.sleep(wait)
        upstream = http.client.HTTPConnection(self.proxy.target, timeout=60)
        try:
            self._ask(upstream, exchange, body)
        finally:
            upstream.close()

    def _ask(self, upstream: http.client.HTTPConnection, exchange: Exchange, body: bytes) -> _Answer:
        self._send_head(upstream)
        upstream.endheaders(body or None)
        response = upstream.getresponse()
        data = response.read()
        exchange.answers.append(response.status)
        if exchange.method == "GET":
            exchange.held = hashlib.sha256(data).hexdigest()
        hidden = ("connection", "transfer-encoding", "content-length")
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in hidden]
        length = response.headers["Content-Length"] if exchange.method == "HEAD" else str(len(data))
        return _Answer(response.status, [*headers, ("Content-Length", length or "0")], data)

    def _cut_request(self, exchange: Exchange, body: bytes) -> None:
        """The server's answer, if it has one to that, is recorded."""
        upstream = http.client.HTTPConnection(self.proxy.target, timeout=60)
        try:
            self._send_head(upstream)
            upstream.endheaders(body[: len(body) // 2] or None)
            assert upstream.sock is not None
            upstream.sock.shutdown(socket.SHUT_WR)
            exchange.answers.append(upstream.getresponse().status)
        except (OSError, http.client.HTTPException):
            pass
        finally:
            upstream.close()

    def _send_head(self, upstream: http.client.HTTPConnection) -> None:
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect"):
                upstream.putheader(name, value)

    def _reply(self, exchange: Exchange, answer: _Answer | None) -> None:
        if answer is None:
            self._hang_up(reset=False)
            return
        exchange.told = answer.status
        exchange.at = time.monotonic()  # before the bytes: the client may act on them at once
        self.connection.sendall(self._bytes(answer))

    def _bytes(self, answer: _Answer) -> bytes:
        lines = [f"HTTP/1.1 {answer.status} {http.client.responses.get(answer.status, '')}"]
        lines += [f"{name}: {value}" for name, value in answer.headers]
        body = b"" if self.command == "HEAD" else answer.body
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def _invented(self, chance: random.Random) -> _Answer:
        # Only where the body of a success is read to its end do clients find the error inside a 200.
        status, code = chance.choice(_ERRORS if self.command == "PUT" else _ERRORS[:3])
        text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>invented</Message></Error>'
        body = text.encode() if code else b"<html>bad gateway</html>"
        return _Answer(
            status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body
        )

    def _hang_up(self, *, reset: bool) -> None:
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""
