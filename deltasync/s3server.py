"""An S3 server for the demo and for tests, in this process or as its own: `python -m deltasync.s3server PORT`.

It is moto, in memory, with one addition. moto checks `If-None-Match` and then writes, without a lock in between, so two
writers of one key can both win; here one request is served at a time, which makes put-if-absent atomic.
"""

import io
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

BUCKET: Final = "deltasync"
"""The bucket that exists from the start."""

CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "embedded",
    "AWS_SECRET_ACCESS_KEY": "embedded",
    "AWS_DEFAULT_REGION": "us-east-1",
}
"""Environment variables for clients. The server checks no credentials, but boto3 insists on having some."""


class OneAtATime:
    """A WSGI application that lets one request into `inner` at a time.

    Bodies are received before and sent after a request's turn, so a slow client holds up nobody. A request whose body
    is cut off is refused, as by S3; moto would store what there is of it.
    """

    def __init__(self, inner: WSGIApplication) -> None:
        self._inner = inner
        self._turn = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        whole = environ.get("wsgi.input_terminated", False)  # a chunked body, which ends by itself
        length = -1 if whole else int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        if len(body) < length:
            start_response("400 Bad Request", [("Content-Type", "application/xml")])
            return [b"<Error><Code>IncompleteBody</Code><Message>The body was cut off.</Message></Error>"]
        environ["wsgi.input"] = io.BytesIO(body)
        with self._turn:
            return list(self._inner(environ, start_response))


class EmbeddedS3Server:
    """Serves on a background thread from `start()`, or `with`, to `close()`. Port 0 takes a free one.

    moto keeps its buckets per process: two servers in one process serve the same objects.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._address = (host, port)
        self._server: BaseWSGIServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The endpoint, for `endpoint_url`. Raises RuntimeError before the start."""
        if self._server is None:
            raise RuntimeError("the embedded S3 server is not running")
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> Self:
        """Listen, and create the bucket `BUCKET`. Raises OSError if the port is taken."""
        self._server = _make_server(*self._address)
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3server", daemon=True)
        self._thread.start()
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT"), timeout=60).close()
        return self

    def close(self) -> None:
        """Stop serving; idempotent."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            self._thread.join()
            server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _make_server(host: str, port: int) -> "BaseWSGIServer":
    # moto takes a second to import and is installed only with the demo.
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    class QuietHandler(MotoRequestHandler):  # type: ignore[misc]  # moto is untyped
        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            """Print nothing: the demo's table has the terminal."""

    application = OneAtATime(DomainDispatcherApplication(create_backend_app))
    return make_server(host, port, application, threaded=True, request_handler=QuietHandler)


def main(arguments: list[str]) -> int:
    """Serve on the given port until SIGTERM or SIGINT; the first line printed is the endpoint."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        print("usage: python -m deltasync.s3server PORT", file=sys.stderr)
        return 2
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with EmbeddedS3Server(port=int(arguments[0])) as server:
        print(server.url, flush=True)
        stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
