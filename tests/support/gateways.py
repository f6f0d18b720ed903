"""Gateways before the embedded S3 server that do what some real ones do, and should not."""

from collections.abc import Iterable
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class IgnoresConditions:
    """Never sees `If-None-Match`, like JuiceFS's gateway: every put succeeds."""

    def __init__(self, inner: WSGIApplication) -> None:
        self._inner = inner

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return self._inner(environ, start_response)


class RemembersMissing:
    """Answers 404 for what it was once asked for in vain, like a cache that keeps negative entries."""

    def __init__(self, inner: WSGIApplication) -> None:
        self._inner = inner
        self._missing: set[str] = set()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "HEAD" and path in self._missing:
            start_response("404 Not Found", [("Content-Length", "0")])
            return []

        def noting(status: str, *more: object) -> object:
            if environ["REQUEST_METHOD"] == "HEAD" and status.startswith("404"):
                self._missing.add(path)
            return start_response(status, *more)  # type: ignore[arg-type]

        return self._inner(environ, noting)  # type: ignore[arg-type]


class OnePageOnly:
    """Says of every page of a listing that it is the last."""

    def __init__(self, inner: WSGIApplication) -> None:
        self._inner = inner

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if "list-type=2" not in environ["QUERY_STRING"]:
            return self._inner(environ, start_response)
        told: list[tuple[object, ...]] = []
        body = b"".join(self._inner(environ, lambda *answer: told.append(answer)))  # type: ignore[arg-type]
        status, headers = told[-1][:2]
        body = body.replace(b"<IsTruncated>true</IsTruncated>", b"<IsTruncated>false</IsTruncated>")
        headers = [one for one in headers if one[0].lower() != "content-length"]  # type: ignore[attr-defined]
        start_response(status, [*headers, ("Content-Length", str(len(body)))])  # type: ignore[arg-type]
        return [body]
