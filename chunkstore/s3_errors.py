"""What botocore and urllib3 raise, as our errors."""

from typing import Any, Final

import boto3.exceptions
import botocore.exceptions as boto
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from chunkstore.errors import (
    AccessDenied,
    ConfigError,
    CredentialsExpired,
    DeltasyncError,
    LimitExceeded,
    ObjectMissing,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)

RAISED: Final = (
    boto.BotoCoreError,
    boto.ClientError,
    boto.UndefinedModelAttributeError,
    boto3.exceptions.Boto3Error,
    ResponseParserError,
    urllib3.exceptions.HTTPError,
    OSError,
)
"""Everything a call of boto3's S3 client may raise for reasons outside this program."""

_KEYS_HINT = "check the AWS credentials of this process and that they may read and write this prefix"
_ONE_LINE_HINT = "correct the AWS access key or session token of this process: each is one line"
_NO_KEYS_HINT = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this machine a role"
_SETUP_HINT = "check url, endpoint_url and region, and the AWS profile of this process"

_CODES: Final[dict[str, tuple[type[DeltasyncError], str]]] = {
    "NoSuchKey": (ObjectMissing, ""),
    "NoSuchBucket": (StoreUnsuitable, "create the bucket, or correct the url"),
    "ExpiredToken": (CredentialsExpired, "they are renewed on the next call"),
    "ExpiredTokenException": (CredentialsExpired, "they are renewed on the next call"),
    "InvalidToken": (CredentialsExpired, "they are renewed on the next call"),
    "TokenRefreshRequired": (CredentialsExpired, "they are renewed on the next call"),
    "RequestExpired": (CredentialsExpired, "they are renewed on the next call"),
    "RequestTimeTooSkewed": (AccessDenied, "set the clock of this machine"),
    "QuotaExceeded": (StoreFull, "raise the quota, or run garbage collection"),
    "XMinioStorageFull": (StoreFull, "free space on the server, or run garbage collection"),
    "XMinioAdminBucketQuotaExceeded": (StoreFull, "raise the quota, or run garbage collection"),
    "InsufficientStorage": (StoreFull, "free space on the server, or run garbage collection"),
    "EntityTooLarge": (LimitExceeded, "write smaller objects"),
    "NotImplemented": (StoreUnsuitable, "the server lacks what this operation needs"),
    # Damaged or cut off on the way; the server has kept nothing.
    "RequestTimeout": (StoreUnavailable, ""),
    "IncompleteBody": (StoreUnavailable, ""),
    "BadDigest": (StoreUnavailable, ""),
    "XAmzContentSHA256Mismatch": (StoreUnavailable, ""),
}

_STATUSES: Final[dict[int, tuple[type[DeltasyncError], str]]] = {
    # A HEAD has no body to say so: this is how AWS answers one that is signed with an expired token.
    400: (CredentialsExpired, "they are renewed on the next call; " + _KEYS_HINT),
    401: (AccessDenied, _KEYS_HINT),
    403: (AccessDenied, _KEYS_HINT),
    404: (ObjectMissing, ""),
    408: (StoreUnavailable, ""),
    409: (StoreUnavailable, ""),
    413: (LimitExceeded, "write smaller objects"),
    425: (StoreUnavailable, ""),
    429: (StoreUnavailable, ""),
    501: (StoreUnsuitable, "the server lacks what this operation needs"),
    507: (StoreFull, "free space on the server, or run garbage collection"),
}

# The first class that fits decides; whatever fits none is a matter of configuration.
_CLASSES: Final[tuple[tuple[tuple[type[Exception], ...], type[DeltasyncError], str], ...]] = (
    (
        (boto.CredentialRetrievalError, boto.MetadataRetrievalError, boto.TokenRetrievalError),
        CredentialsExpired,
        "they could not be renewed; " + _KEYS_HINT,
    ),
    ((boto.NoCredentialsError,), AccessDenied, _NO_KEYS_HINT),
    (
        (
            boto.PartialCredentialsError,
            boto.UnknownCredentialError,
            boto.NoAuthTokenError,
            boto.UnknownTokenProviderError,
            boto.RefreshWithMFAUnsupportedError,
            boto.SSOError,
            boto.LoginError,
        ),
        AccessDenied,
        _KEYS_HINT,
    ),
    ((boto.SSLError,), StoreUnavailable, "check endpoint_url and the certificates this machine trusts"),
    (
        (
            boto.ConnectionError,
            boto.HTTPClientError,
            boto.IncompleteReadError,
            boto.ChecksumError,
            boto.FlexibleChecksumError,
            boto.CapacityNotAvailableError,
            boto.PaginationError,
            ResponseParserError,
            urllib3.exceptions.HTTPError,
            OSError,
        ),
        StoreUnavailable,
        "",
    ),
)


def unsendable(error: Exception) -> bool:
    """Whether Python's HTTP client has refused a header, as a rule one with credentials, which `error` then shows."""
    return isinstance(error, boto.HTTPClientError) and "Invalid header " in str(error)


def status_of(error: Exception) -> tuple[int, str]:
    """HTTP status and S3 error code of the server's answer; (0, "") if `error` is none."""
    if not isinstance(error, boto.ClientError):
        return 0, ""
    response: dict[str, Any] = dict(error.response)
    return (
        int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0),
        str(response.get("Error", {}).get("Code") or ""),
    )


def translated(error: Exception, what: str) -> DeltasyncError:
    """The error to raise for `error`, one of `RAISED`; `what` is the operation and the URL, to begin the message."""
    if isinstance(error, boto.ClientError):
        return _answered(error, what)
    if unsendable(error):
        return AccessDenied(
            f"{what}: the credentials cannot be sent in a request's header", hint=_ONE_LINE_HINT
        )
    # Only its class and text: neither holds the request's headers, so no credentials.
    message = f"{what}: {type(error).__name__}: {error}"
    for classes, kind, hint in _CLASSES:
        if isinstance(error, classes):
            return kind(message, hint=hint)
    return ConfigError(message, hint=_SETUP_HINT)


def _answered(error: boto.ClientError, what: str) -> DeltasyncError:
    status, code = status_of(error)
    text = str(error.response.get("Error", {}).get("Message") or "")
    message = f"{what}: the server answered {status} {code}{': ' + text if text else ''}"
    if code in _CODES:
        kind, hint = _CODES[code]
    elif status in _STATUSES and (status != 400 or code in ("400", "Bad Request", "")):
        kind, hint = _STATUSES[status]
    elif status >= 500 or status < 400:
        kind, hint = StoreUnavailable, ""
    else:
        kind, hint = StoreUnsuitable, _SETUP_HINT
    return kind(message, hint=hint)
