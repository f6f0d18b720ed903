"""The daemons' small HTTP server: /healthz, /readyz, /status, /metrics, and a page for people at /.

It knows nothing of what it shows. It lies in the lowest layer because publisher and subscriber, which both need it,
have no other in common.
"""

import html
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field

from chunkstore.config import Section
from chunkstore.errors import ConfigError

_TEXT: Final = "text/plain; charset=utf-8"
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_NAMES: Final = ("", "healthz", "readyz", "status", "metrics")


def _host(text: str) -> str:
    try:
        text.encode("idna")  # as the socket does, where it ends in a TypeError
    except UnicodeError:
        wrong = True
    else:
        wrong = any(char.isspace() or not char.isprintable() for char in text)
    if wrong:
        raise ValueError("has to be a name or an address of this host, such as 127.0.0.1 or 0.0.0.0")
    return text


class HttpConfig(Section):
    """Where /healthz, /readyz, /status and /metrics are served. Port 0: any free port."""

    host: Annotated[str, AfterValidator(_host)] = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)


@dataclass(frozen=True)
class Answers:
    """What a daemon says of itself, each asked per request, from threads of the server.

    `unready`: why it is not ready, None if it is. `status`: JSON. `metrics`: Prometheus text. `page`: HTML.
    """

    unready: Callable[[], str | None]
    status: Callable[[], str]
    metrics: Callable[[], bytes]
    page: Callable[[], str]


def check_address(config: HttpConfig) -> None:
    """Raise ConfigError if a StatusServer could not listen there now."""
    _listen(config, BaseHTTPRequestHandler).server_close()


def _listen(config: HttpConfig, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    try:
        return ThreadingHTTPServer((config.host, config.port), handler)
    except socket.gaierror as error:
        raise ConfigError(
            f"http.host: {config.host!r} cannot be listened on: {error.strerror}",
            hint="set http.host to a name or an address of this host, such as 127.0.0.1 or 0.0.0.0",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"http: cannot listen on {config.host}:{config.port}: {error}",
            hint="set http.port to another port, 0 for any free one, or http: null",
        ) from error


class StatusServer:
    """Serves answers while the `with` block runs. Raises ConfigError if the address cannot be used.

    `parts`: by path, such as `/servers/a`, the answers of what can be asked about by itself.
    """

    def __init__(
        self, config: HttpConfig, answers: Answers, parts: Mapping[str, Answers] | None = None
    ) -> None:
        handler = type("Handler", (_Handler,), {"parts": {"": answers, **(parts or {})}})
        self._server = _listen(config, handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            daemon=True,
            name="deltasync-http",
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    parts: Mapping[str, Answers]
    server_version = "deltasync"
    timeout = 30  # seconds a client may take over its request

    def do_GET(self) -> None:
        part, _, name = self.path.split("?", 1)[0].rpartition("/")
        answers = self.parts.get(part)
        if answers is None or name not in _NAMES:
            self._answer(404, _TEXT, f"there are {', '.join(self._paths())}\n".encode())
        elif name == "healthz":
            self._answer(200, _TEXT, b"ok\n")
        elif name == "readyz":
            reason = answers.unready()
            text = "ready" if reason is None else f"not ready: {reason}"
            self._answer(200 if reason is None else 503, _TEXT, f"{text}\n".encode())
        elif name == "status":
            self._answer(200, "application/json", answers.status().encode())
        elif name == "metrics":
            self._answer(200, _PROMETHEUS, answers.metrics())
        else:
            self._answer(200, "text/html; charset=utf-8", answers.page().encode())

    do_HEAD = do_GET  # noqa: N815

    def _paths(self) -> list[str]:
        return [f"{part}/{name}" for part in self.parts for name in _NAMES]

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes every few seconds would drown the log."""


def html_page(
    title: str, facts: Mapping[str, object], columns: Iterable[str], rows: Iterable[Iterable[object]]
) -> str:
    """A page for Answers: `facts` by name, then a table of versions with their times in seconds. Texts are escaped."""
    head = "".join(f"<th>{html.escape(name)}" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}" for cell in row) for row in rows)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5>"
        f"<title>{html.escape(title)}</title><style>body{{font:14px system-ui;margin:2em}}"
        "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;"
        f"border-bottom:1px solid #ddd}}</style><h1>{html.escape(title)}</h1><table>"
        + "".join(f"<tr><th>{html.escape(key)}<td>{html.escape(str(value))}" for key, value in facts.items())
        + f"</table><h2>Versions</h2><table><tr>{head}{body}</table><p>Times in seconds.</html>"
    )
