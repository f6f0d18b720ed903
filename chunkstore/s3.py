"""A store in a bucket of S3 or of a server that speaks its protocol, through botocore, on which boto3 rests.

Every object is written by one PutObject, never multipart: a single conditional PutObject is the only put-if-absent that
servers agree on. botocore makes one attempt per call; chunkstore.retry repeats what may be repeated.

Integrity of what is written rests on the SHA-256 of the body inside the request's signature (SigV4), which every server
that checks signatures checks too. Content-MD5 would cost a second, slower hash for the same promise, and the newer
checksum headers and trailers are refused, or stored as part of the object, by some servers.
"""

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, cast

import botocore.session
from botocore.awsrequest import AWSPreparedRequest
from botocore.config import Config
from botocore.loaders import create_loader

from chunkstore.errors import (
    AccessDenied,
    ConfigError,
    CorruptObject,
    CredentialsExpired,
    InvalidKey,
    LimitExceeded,
    ObjectMissing,
    StoreUnavailable,
    StoreUnsuitable,
)
from chunkstore.s3_errors import RAISED, status_of, translated, unsendable
from chunkstore.store import Buffer, ObjectInfo, Store, check_key, check_prefix, is_key

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef

_making = threading.Lock()
_loader: Final = create_loader()


def _unlock_in_child() -> None:
    """A lock that another thread held during the fork would stay locked in the child for ever."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_child)

MAX_PUT: Final = 5 << 30
"""The most bytes S3 takes in one PutObject."""


class S3Store(Store):
    """Objects under `prefix` of `bucket`; timeouts in seconds, `connections` per process, `page` keys per listing.

    `hold`: called in every put when all but the last byte has been sent, so that several can arrive at one moment.
    The HTTP client is made on first use, anew in every process, and anew after the server has refused its credentials,
    so that rotated ones are read from wherever the AWS chain finds them.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        path_style: bool = False,
        connect_timeout: float = 10.0,
        read_timeout: float = 60.0,
        connections: int = 10,
        page: int = 1000,
        hold: Callable[[], object] | None = None,
    ) -> None:
        self._hold = hold
        self._bucket = bucket
        self._base = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint_url = endpoint_url
        self._region = region
        self._page = page
        self._config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path" if path_style else "auto", "payload_signing_enabled": True},
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            max_pool_connections=connections,
            tcp_keepalive=True,
        )
        self._made: tuple[int, S3Client] | None = None

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._base}".rstrip("/")

    def get(self, key: str, *, limit: int) -> bytes:
        with self._errors("get", key):
            response = self._client().get_object(Bucket=self._bucket, Key=self._name(key))
            size = response["ContentLength"]
            if size > limit:
                response["Body"].close()
                raise LimitExceeded(f"get {self.url}/{key}: {size} bytes, more than the limit of {limit}")
            return self._body("get", key, response)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        name = self._name(key)
        if length == 0:  # a Range header cannot ask for nothing
            info = self.head(key)
            if info is None:
                raise ObjectMissing(f"get_range {self.url}/{key}: there is no such object")
            if start > info.size:
                raise self._ends_early(key, info.size, start)
            return b""
        with self._errors("get_range", key):
            try:
                response = self._client().get_object(
                    Bucket=self._bucket, Key=name, Range=f"bytes={start}-{start + length - 1}"
                )
            except RAISED as error:
                if status_of(error)[0] == 416:
                    raise self._ends_early(key, None, start + length) from error
                raise
            size = response["ContentLength"]
            whole = response["ResponseMetadata"]["HTTPStatusCode"] != 206
            if size > length or (whole and start > 0):
                response["Body"].close()
                raise StoreUnsuitable(
                    f"get_range {self.url}/{key}: the server ignores the Range header",
                    hint="use a server that supports ranged reads",
                )
            data = self._body("get_range", key, response)
            if size < length:
                raise self._ends_early(key, start + size, start + length)
            return data

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors("head", key):
                response = self._client().head_object(Bucket=self._bucket, Key=self._name(key))
                return ObjectInfo(key, response["ContentLength"], response["LastModified"].timestamp())
        except ObjectMissing:
            return None

    def put(self, key: str, data: Buffer) -> None:
        body = self._to_send("put", key, data)
        with self._errors("put", key):
            self._client().put_object(Bucket=self._bucket, Key=self._name(key), Body=body)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        body = self._to_send("put_if_absent", key, data)
        with self._errors("put_if_absent", key):
            try:
                self._client().put_object(
                    Bucket=self._bucket, Key=self._name(key), Body=body, IfNoneMatch="*"
                )
            except RAISED as error:
                if status_of(error)[0] == 412:
                    return False
                raise
            return True

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        if after > prefix and not after.startswith(prefix):
            return  # every key with this prefix sorts before `after`
        # Each page asks for what follows the last key; a continuation token may age while the caller works.
        last = self._base + after if after >= prefix else ""
        more = True
        while more:
            with self._errors("list", prefix):
                response = self._client().list_objects_v2(
                    Bucket=self._bucket, Prefix=self._base + prefix, StartAfter=last, MaxKeys=self._page
                )
                contents = response.get("Contents", [])
                more = response["IsTruncated"]  # every listing says so: without it, this is none
                if more and not contents:
                    raise StoreUnavailable(
                        f"list {self.url}/{prefix}: a page without keys claims that more follow"
                    )
                infos = [
                    ObjectInfo(item["Key"], item["Size"], item["LastModified"].timestamp())
                    for item in contents
                ]
            for info in infos:
                if info.key <= last:
                    raise StoreUnsuitable(
                        f"list {self.url}/{prefix}: {info.key!r:.200} came after {last!r:.200}",
                        hint="use a bucket that lists keys in ascending order, from where StartAfter says",
                    )
                last = info.key
                key = info.key.removeprefix(self._base)
                if is_key(key):
                    yield ObjectInfo(key, info.size, info.modified)

    def delete(self, key: str) -> None:
        with self._errors("delete", key):
            try:
                self._client().delete_object(Bucket=self._bucket, Key=self._name(key))
            except RAISED as error:
                if status_of(error) not in ((404, "NoSuchKey"), (404, "404")):
                    raise

    def temporaries(self) -> Iterator[ObjectInfo]:
        return iter(())

    def delete_temporary(self, name: str) -> None:
        raise InvalidKey(f"{self.url}/{name}: this store has no temporaries")

    def _name(self, key: str) -> str:
        return self._base + check_key(key)

    def _client(self) -> "S3Client":
        with _making:
            made = self._made
            if made is None or made[0] != os.getpid():
                made = self._made = (os.getpid(), self._new_client())
            return made[1]

    def _new_client(self) -> "S3Client":
        try:
            # A session of its own: the default one keeps the credentials it once found. But without parsing the
            # description of S3 again, for 0.1 s, while each try with credentials that have run out needs one.
            session = botocore.session.Session()
            session.register_component("data_loader", _loader)
            made = session.create_client(
                "s3", endpoint_url=self._endpoint_url, region_name=self._region, config=self._config
            )
        except ValueError as error:
            raise ConfigError(f"{self.url}: {error}", hint="check endpoint_url and region") from error
        client = cast("S3Client", made)
        hold = self._hold
        if hold is not None:

            def hold_back(request: AWSPreparedRequest, **_: object) -> None:
                assert isinstance(request.body, io.BytesIO), "how boto3 keeps the bytes that it is given"
                request.body = _HeldBack(request.body.getvalue(), hold)

            client.meta.events.register("before-send.s3.PutObject", hold_back)
        return client

    @contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        """Turn what boto3 raises in the block into the typed error for this operation and key."""
        try:
            yield
        except RAISED as error:
            raised = translated(error, f"{operation} {self.url}/{key}")
            if isinstance(raised, (AccessDenied, CredentialsExpired)):
                self._made = None
            raise raised from None if unsendable(error) else error
        # Of an answer whose head was cut off, which http.client takes for whole: a field is missing, or half a date.
        except KeyError as error:
            raise StoreUnavailable(f"{operation} {self.url}/{key}: the answer has no {error}") from error
        except ValueError as error:
            raise StoreUnavailable(
                f"{operation} {self.url}/{key}: the answer makes no sense: {error}"
            ) from error

    def _to_send(self, operation: str, key: str, data: Buffer) -> bytes:
        body = bytes(data)  # no copy of bytes; botocore takes no memoryview
        if len(body) > MAX_PUT:
            raise LimitExceeded(
                f"{operation} {self.url}/{key}: {len(body)} bytes, more than the {MAX_PUT} of one PutObject",
                hint="write smaller objects",
            )
        return body

    def _body(self, operation: str, key: str, response: "GetObjectOutputTypeDef") -> bytes:
        """The response's body. Raises StoreUnavailable if it is shorter or longer than the server announced."""
        parts: list[bytes] = []
        announced = response["ContentLength"]
        left = announced + 1  # one more than is wanted, to notice a body that is longer
        with closing(response["Body"]) as body:
            while left and (part := body.read(left)):
                parts.append(part)
                left -= len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(data) != announced:
            raise StoreUnavailable(
                f"{operation} {self.url}/{key}: the body ended after {len(data)} of {announced} bytes"
            )
        return data

    def _ends_early(self, key: str, size: int | None, end: int) -> CorruptObject:
        found = "before" if size is None else f"at byte {size}, before"
        return CorruptObject(f"get_range {self.url}/{key}: the object ends {found} byte {end}")


class _HeldBack(io.BytesIO):
    """A body as the HTTP client reads it to send it; `release` is called before the last byte is handed out."""

    def __init__(self, body: bytes, release: Callable[[], object]) -> None:
        super().__init__(body)
        self._left = len(body)
        self._release = release

    def read(self, size: int | None = -1) -> bytes:
        if self._left == 1:
            self._release()
        most = max(self._left - 1, 1)
        piece = super().read(most if size is None or size < 0 else min(size, most))
        self._left -= len(piece)
        return piece
