"""As much of AWS IAM as our documented policies use, enforced in front of the embedded S3 server."""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from deltasync.s3server import OneAtATime

A = TypeVar("A", bound=WSGIApplication)
Values = str | list[str]


@dataclass(frozen=True)
class Request:
    """What is asked: an IAM action, its resource, and the condition keys that are present."""

    action: str
    resource: str
    context: Mapping[str, str]


@dataclass
class Policy:
    """The statements of one identity's policy, and which of their (statement, resource) pairs allowed something."""

    document: Mapping[str, Any]
    used: set[tuple[str, str]] = field(default_factory=set)
    denied: list[Request] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str, **names: str) -> "Policy":
        """`names`: what stands for the placeholders."""
        for placeholder, name in names.items():
            text = text.replace(placeholder, name)
        policy = cls(json.loads(text))
        assert policy.document["Version"] == "2012-10-17"
        assert all(s["Effect"] == "Allow" and s.keys() <= _KEYS for s in policy.statements)
        return policy

    @property
    def statements(self) -> list[dict[str, Any]]:
        statements: list[dict[str, Any]] = self.document["Statement"]
        return statements

    @property
    def grants(self) -> set[tuple[str, str]]:
        return {(s["Sid"], resource) for s in self.statements for resource in _list(s["Resource"])}

    def allows(self, request: Request) -> bool:
        """Records what allowed it, or the request."""
        by = {
            (statement["Sid"], resource)
            for statement in self.statements
            for resource in _list(statement["Resource"])
            if request.action in _list(statement["Action"])
            and _like(resource, request.resource)
            and _meets(statement.get("Condition", {}), request.context)
        }
        self.used |= by
        if not by:
            self.denied.append(request)
        return bool(by)


_KEYS = {"Sid", "Effect", "Action", "Resource", "Condition"}


def _list(values: Values) -> list[str]:
    return [values] if isinstance(values, str) else values


def _like(pattern: str, text: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), text) is not None


def _meets(conditions: Mapping[str, Mapping[str, Values]], context: Mapping[str, str]) -> bool:
    for operator, keys in conditions.items():
        for key, values in keys.items():
            if operator == "StringLike":
                met = key in context and any(_like(value, context[key]) for value in _list(values))
            elif operator == "Null":
                met = _list(values) == [str(key not in context).lower()]
            else:
                raise AssertionError(f"condition operator {operator} is not known here")
            if not met:
                return False
    return True


def request_of(environ: WSGIEnvironment) -> Request:
    """The IAM request that one S3 request with a path-style URL amounts to."""
    bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
    method, query = environ["REQUEST_METHOD"], parse_qs(environ.get("QUERY_STRING", ""))
    context = {"s3:if-none-match": environ["HTTP_IF_NONE_MATCH"]} if "HTTP_IF_NONE_MATCH" in environ else {}
    if key:
        action = {"GET": "GetObject", "HEAD": "GetObject", "PUT": "PutObject", "DELETE": "DeleteObject"}[
            method
        ]
        return Request(f"s3:{action}", f"arn:aws:s3:::{bucket}/{key}", context)
    assert (method, query["list-type"]) == ("GET", ["2"])
    return Request("s3:ListBucket", f"arn:aws:s3:::{bucket}", {"s3:prefix": query.get("prefix", [""])[0]})


class Enforced:
    """A WSGI application that answers 403 to what `policy` does not allow."""

    def __init__(self, inner: WSGIApplication, policy: Policy) -> None:
        self._inner = inner
        self._policy = policy

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if self._policy.allows(request_of(environ)):
            return self._inner(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        start_response(
            "403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        )
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]


class Expiring:
    """A WSGI application that refuses all access keys but `valid`, with `code`, as AWS does.

    `last`: the prefix of an object; the key that is valid runs out when something is put there.
    """

    def __init__(self, inner: WSGIApplication, code: str, valid: str) -> None:
        self._inner = inner
        self._code = code
        self.valid = valid
        self.last: str | None = None
        self.refused = 0

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if self.last and environ["REQUEST_METHOD"] == "PUT" and f"/{self.last}" in environ["PATH_INFO"]:
            self.valid, self.last = "", None
        if f"Credential={self.valid}/" in environ["HTTP_AUTHORIZATION"]:
            return self._inner(environ, start_response)
        self.refused += 1
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        head = environ["REQUEST_METHOD"] == "HEAD"  # which has no room for the code
        body = b"" if head else f"<Error><Code>{self._code}</Code><Message>no</Message></Error>".encode()
        status = "400 Bad Request" if self._code == "ExpiredToken" else "403 Forbidden"
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


@contextmanager
def enforcing(policy: Policy) -> Iterator[str]:
    """The endpoint of a server of the embedded server's buckets, for the identity that has `policy`."""
    with serving(lambda inner: Enforced(inner, policy)) as (_, endpoint):
        yield endpoint


@contextmanager
def expiring(code: str, valid: str) -> Iterator[tuple[Expiring, str]]:
    """The same for access keys that run out, and their application."""
    with serving(lambda inner: Expiring(inner, code, valid)) as served:
        yield served


@contextmanager
def serving(wrap: Callable[[WSGIApplication], A]) -> Iterator[tuple[A, str]]:
    """The embedded server's buckets, served once more through an application of one's own: that, and its endpoint."""

    class Quiet(MotoRequestHandler):  # type: ignore[misc]  # moto is untyped
        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Print nothing."""

    application = wrap(OneAtATime(DomainDispatcherApplication(create_backend_app)))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield application, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
