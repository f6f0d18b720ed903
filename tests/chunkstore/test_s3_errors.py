"""Every exception of botocore and boto3 becomes one of our errors."""

import string
from collections.abc import Iterator
from typing import Any

import boto3.exceptions
import botocore.exceptions as boto
import pytest
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from chunkstore.errors import (
    AccessDenied,
    Action,
    ConfigError,
    CredentialsExpired,
    DeltasyncError,
    LimitExceeded,
    ObjectMissing,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from chunkstore.s3_errors import RAISED, translated


def every_class() -> Iterator[type[Exception]]:
    for module in (boto, boto3.exceptions):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, Warning):
                yield value


def answer(status: int, code: str, kind: type[boto.ClientError] = boto.ClientError) -> boto.ClientError:
    response: Any = {
        "Error": {"Code": code, "Message": "text"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return kind(response, "PutObject")


def instance(kind: type[Exception]) -> Exception:
    if issubclass(kind, boto.ClientError):
        return answer(500, "X", kind)
    if issubclass(kind, boto.WaiterError):
        return kind("x", "x", {})
    if issubclass(kind, boto.BotoCoreError) and kind.__module__ == boto.__name__:
        names = {name for _, name, _, _ in string.Formatter().parse(kind.fmt) if name}
        return kind(**dict.fromkeys(names, "x"))
    return kind.__new__(kind, "text")


@pytest.mark.parametrize("kind", sorted(set(every_class()), key=repr))
def test_every_class_is_caught_and_mapped(kind: type[Exception]) -> None:
    assert issubclass(kind, RAISED)
    error = translated(instance(kind), "get s3://bucket/key")
    assert isinstance(error, DeltasyncError)
    assert error.message.startswith("get s3://bucket/key: ")
    assert error.hint or isinstance(error, StoreUnavailable)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (boto.EndpointConnectionError(endpoint_url="u"), StoreUnavailable),
        (boto.ConnectTimeoutError(endpoint_url="u"), StoreUnavailable),
        (boto.ReadTimeoutError(endpoint_url="u"), StoreUnavailable),
        (boto.ConnectionClosedError(endpoint_url="u"), StoreUnavailable),
        (boto.ResponseStreamingError(error="x"), StoreUnavailable),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), StoreUnavailable),
        (boto.SSLError(endpoint_url="u", error=OSError("x")), StoreUnavailable),
        (urllib3.exceptions.ProtocolError("cut"), StoreUnavailable),
        (ConnectionResetError("cut"), StoreUnavailable),
        (ResponseParserError("not XML"), StoreUnavailable),
        (boto.CredentialRetrievalError(provider="p", error_msg="x"), CredentialsExpired),
        (boto.NoCredentialsError(), AccessDenied),
        (boto.PartialCredentialsError(provider="p", cred_var="v"), AccessDenied),
        (boto.UnauthorizedSSOTokenError(), AccessDenied),
        (boto.NoRegionError(), ConfigError),
        (boto.ProfileNotFound(profile="p"), ConfigError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_never_was_an_answer(error: Exception, expected: type[DeltasyncError]) -> None:
    assert type(translated(error, "get k")) is expected


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "NoSuchKey", ObjectMissing),
        (404, "404", ObjectMissing),
        (404, "NoSuchBucket", StoreUnsuitable),
        (403, "AccessDenied", AccessDenied),
        (403, "InvalidAccessKeyId", AccessDenied),
        (403, "403", AccessDenied),
        (403, "RequestTimeTooSkewed", AccessDenied),
        (401, "Unauthorized", AccessDenied),
        (400, "ExpiredToken", CredentialsExpired),
        (403, "ExpiredToken", CredentialsExpired),
        (400, "400", CredentialsExpired),
        (400, "RequestTimeout", StoreUnavailable),
        (400, "BadDigest", StoreUnavailable),
        (400, "XAmzContentSHA256Mismatch", StoreUnavailable),
        (400, "AuthorizationHeaderMalformed", StoreUnsuitable),
        (409, "ConditionalRequestConflict", StoreUnavailable),
        (429, "TooManyRequests", StoreUnavailable),
        (500, "InternalError", StoreUnavailable),
        (503, "SlowDown", StoreUnavailable),
        (599, "Whatever", StoreUnavailable),
        (200, "InternalError", StoreUnavailable),
        (501, "NotImplemented", StoreUnsuitable),
        (507, "XMinioStorageFull", StoreFull),
        (403, "QuotaExceeded", StoreFull),
        (400, "EntityTooLarge", LimitExceeded),
        (418, "Teapot", StoreUnsuitable),
    ],
)
def test_what_the_server_answered(status: int, code: str, expected: type[DeltasyncError]) -> None:
    mapped = translated(answer(status, code), "put s3://b/k")
    assert type(mapped) is expected
    assert f"put s3://b/k: the server answered {status} {code}: text" in str(mapped)


def test_what_is_passing_is_retried_and_what_is_wrong_is_not() -> None:
    actions = {kind: kind.action for kind in (StoreUnavailable, CredentialsExpired, AccessDenied, StoreFull)}
    assert set(actions.values()) == {Action.RETRY}
    assert ConfigError.action is StoreUnsuitable.action is Action.FATAL
