"""The subscriber's small HTTP server: /healthz, /readyz, /status, /metrics, and a page for people at /."""

import html
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final, Self

from chunkstore.errors import ConfigError
from subscriber.config import HttpConfig
from subscriber.report import AppliedVersion, Report

_TEXT: Final = "text/plain; charset=utf-8"
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_PHASES: Final = ("detect", "fetch", "stage", "prepare", "scatter", "pause")


class StatusServer:
    """Serves `report` while the `with` block runs. Raises ConfigError if the address cannot be used."""

    def __init__(self, config: HttpConfig, report: Report) -> None:
        handler = type("Handler", (_Handler,), {"report": report})
        try:
            self._server = ThreadingHTTPServer((config.host, config.port), handler)
        except OSError as error:
            raise ConfigError(
                f"http: cannot listen on {config.host}:{config.port}: {error}",
                hint="choose another port, 0 for any free one, or http: null",
            ) from error
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
    report: Report
    server_version = "deltasync"
    timeout = 30  # seconds a client may take over its request

    def do_GET(self) -> None:
        path = self.path.split("?", 1)[0]
        if path == "/healthz":
            self._answer(200, _TEXT, b"ok\n")
        elif path == "/readyz":
            reason = self.report.reason
            text = "ready" if reason is None else f"not ready: {reason}"
            self._answer(200 if reason is None else 503, _TEXT, f"{text}\n".encode())
        elif path == "/status":
            self._answer(200, "application/json", self.report.status().model_dump_json(indent=1).encode())
        elif path == "/metrics":
            self._answer(200, _PROMETHEUS, self.report.metrics.text())
        elif path == "/":
            self._answer(200, "text/html; charset=utf-8", page(self.report, time.time()).encode())
        else:
            self._answer(404, _TEXT, b"there are /, /healthz, /readyz, /status and /metrics\n")

    do_HEAD = do_GET  # noqa: N815

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


def page(report: Report, now: float) -> str:
    """The status page: what is served, what is wrong, and the timeline of versions, newest first."""
    status = report.status()
    versions, seconds = report.lag()
    facts = {
        "subscriber": status.id,
        "stream": status.stream,
        "state": status.state if status.reason is None else f"{status.state}: {status.reason}",
        "applied version": status.applied_version,
        "newest version": status.newest_version,
        "behind": f"{versions} versions, {seconds:.1f} s",
        "last error": "none"
        if status.last_error is None
        else f"{status.last_error.kind}: {status.last_error.message}",
        "refused": ", ".join(str(refusal.version) for refusal in status.refused) or "none",
    }
    rows = "".join(_row(applied, now) for applied in reversed(report.timeline()))
    head = "".join(f"<th>{name}</th>" for name in ("version", "ago", "path", "bytes", "changed", *_PHASES))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5>"
        "<title>deltasync subscriber</title><style>body{font:14px system-ui;margin:2em}"
        "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;"
        "border-bottom:1px solid #ddd}</style><h1>deltasync subscriber</h1><table>"
        + "".join(f"<tr><th>{key}<td>{html.escape(str(value))}" for key, value in facts.items())
        + f"</table><h2>Versions</h2><table><tr>{head}{rows}</table><p>Times in seconds.</html>"
    )


def _row(applied: AppliedVersion, now: float) -> str:
    steps = len(applied.manifests)
    path = ("anchor" if applied.from_anchor else "delta") + (f" + {steps - 1}" if steps > 1 else "")
    changed = "all" if applied.changed is None else f"{applied.changed:,}"
    times = (f"{applied.seconds[name]:.3f}" if name in applied.seconds else "" for name in _PHASES)
    cells = (applied.version, f"{now - applied.at:.0f} s", path, f"{applied.nbytes:,}", changed, *times)
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells)
