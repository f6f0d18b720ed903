"""A proxy before a server that answers falsely, loses answers or keeps them back, for the requests a test names."""

import contextlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from deltasync.demo.sglang_server import SglangServer

Rule = Callable[[str, str], str | None]
"""Given a request's path and body: `refuse` (200 and success false, not passed on), `lose` (passed on, answer lost),
`late` (passed on, answered once `proxy.go` is set), or None.
"""


class Proxy:
    """`rule` is asked for every request; `met` lists what it did. A context manager."""

    def __init__(self, server: SglangServer) -> None:
        self.rule: Rule = lambda path, body: None
        self.met: list[str] = []
        self.go = threading.Event()
        handler = type("Handler", (_Handler,), {"proxy": self, "target": server})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def once(self, action: str, path: str, word: str = "") -> None:
        """Do `action` to the next request for `path` whose body has `word`."""

        def rule(seen: str, body: str) -> str | None:
            if seen != path or word not in body:
                return None
            self.rule = lambda path, body: None
            return action

        self.rule = rule

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go.set()
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    target: SglangServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        action = self.proxy.rule(self.path, body.decode())
        if action is not None:
            self.proxy.met.append(action)
        if action == "refuse":
            self._answer(200, b'{"success": false, "message": "no"}')
            return
        with self.target.client(120) as client:
            response = client.post(self.path, content=body, headers={"Content-Type": "application/json"})
        if action == "lose":
            self.close_connection = True
            return
        if action == "late":
            self.proxy.go.wait()
        with contextlib.suppress(ConnectionError):  # who asked has given up
            self._answer(response.status_code, response.content)

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the test says what it wants to know."""
