"""An HTTP server that answers every request as the test says: errors, cut-off bodies, no answer at all."""

import io
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    connection: int  # the client's port: the same for two requests over one connection


@dataclass(frozen=True)
class Reply:
    """One answer. `announce` bytes are promised as Content-Length (default: the body's); status 0 hangs up instead.

    `sent`: so many bytes of the answer, head and all, go out before the connection is closed.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    announce: int | None = None
    sent: int | None = None


def s3_error(code: str, status: int) -> Reply:
    """An error document as S3 sends it."""
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>scripted</Message></Error>'
    return Reply(status, text.encode(), {"Content-Type": "application/xml"})


class ScriptedServer:
    """Serves on a free port while the `with` block runs; `requests` holds all that came in."""

    def __init__(self, respond: Callable[[Request], Reply]) -> None:
        self.requests: list[Request] = []
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Request(
                    self.command, self.path, dict(self.headers.items()), body, self.client_address[1]
                )
                scripted.requests.append(request)
                reply = respond(request)
                if reply.status == 0:
                    self.close_connection = True
                    return
                wire = self.wfile
                self.wfile = io.BytesIO()
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(reply.announce or len(reply.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body)
                wire.write(self.wfile.getvalue()[: reply.sent])
                self.wfile = wire
                if reply.announce is not None or reply.sent is not None:
                    self.close_connection = True

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                """Keep the test's output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
