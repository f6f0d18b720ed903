"""What is particular to the store on S3: ambiguous answers, damaged bodies, credentials, forks, the wire."""

import hashlib
import itertools
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from chunkstore.errors import (
    AccessDenied,
    CredentialsExpired,
    LimitExceeded,
    StoreError,
    StoreUnavailable,
    StoreUnsuitable,
)
from chunkstore.memory import MemoryStore
from chunkstore.probe import require_put_if_absent, store_clock
from chunkstore.retry import Backoff, RetryStore
from chunkstore.s3 import S3Store
from deltasync.s3server import BUCKET, EmbeddedS3Server
from tests.support.faults import FaultStore
from tests.support.scripted import Reply, Request, ScriptedServer, s3_error

pytestmark = pytest.mark.usefixtures("aws")

ERROR_IN_200 = Reply(200, s3_error("InternalError", 500).body)
HANG_UP = Reply(status=0)


def store_at(url: str, **options: float) -> S3Store:
    return S3Store(
        "bucket", "runs/1", endpoint_url=url, path_style=True, read_timeout=options.get("timeout", 5.0)
    )


def listing(*keys: str, truncated: bool = False) -> Reply:
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-01-02T03:04:05Z</LastModified></Contents>"
        for key in keys
    )
    text = (
        f"<ListBucketResult><IsTruncated>{str(truncated).lower()}</IsTruncated>{contents}</ListBucketResult>"
    )
    return Reply(200, text.encode())


@pytest.mark.parametrize(
    "reply",
    [
        s3_error("ConditionalRequestConflict", 409),
        s3_error("InternalError", 500),
        s3_error("SlowDown", 503),
        Reply(502, b"<html>bad gateway</html>"),
        ERROR_IN_200,
        HANG_UP,
    ],
    ids=["409", "500", "503", "502-html", "error-in-200", "no-answer"],
)
def test_an_ambiguous_put_if_absent_is_one_attempt_and_an_unknown_outcome(reply: Reply) -> None:
    """FIELD_REPORTS: aws-sdk-java-v2#6580: a retry below us would answer 412 to its own success."""
    with ScriptedServer(lambda request: reply) as server:
        with pytest.raises(StoreUnavailable):
            store_at(server.url).put_if_absent("k", b"data")
        assert [request.method for request in server.requests] == ["PUT"]


def test_a_put_if_absent_that_times_out_is_an_unknown_outcome() -> None:
    answer = threading.Event()

    def late(request: Request) -> Reply:
        answer.wait(30)
        return Reply()

    with ScriptedServer(late) as server:
        try:
            with pytest.raises(StoreUnavailable, match="Read timeout"):
                store_at(server.url, timeout=0.2).put_if_absent("k", b"data")
        finally:
            answer.set()
        assert len(server.requests) == 1


def test_only_412_means_that_the_key_is_taken() -> None:
    with ScriptedServer(lambda request: s3_error("PreconditionFailed", 412)) as server:
        assert store_at(server.url).put_if_absent("k", b"data") is False
        assert server.requests[0].headers["If-None-Match"] == "*"


def test_a_server_that_does_not_know_the_condition_is_refused() -> None:
    """FIELD_REPORTS: minio#21603, juicefs gateway: said so (501), or silently ignored (the probe)."""
    refusing = ScriptedServer(lambda request: s3_error("NotImplemented", 501))
    with refusing as server, pytest.raises(StoreUnsuitable):
        store_at(server.url).put_if_absent("k", b"data")

    class Ignoring(MemoryStore):
        def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
            self.put(key, data)
            return True

    ignoring = Ignoring()
    with pytest.raises(StoreUnsuitable, match="put-if-absent does not hold"):
        require_put_if_absent(ignoring)
    assert list(ignoring.list_after("")) == []


def test_a_server_that_answers_412_but_overwrites_is_refused() -> None:
    class Overwriting(MemoryStore):
        def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
            created = self.head(key) is None
            self.put(key, data)
            return created

    with pytest.raises(StoreUnsuitable, match="not the first writer's bytes"):
        require_put_if_absent(Overwriting())


@pytest.mark.parametrize("fault", ["lost", "refused", "repeated"])
def test_a_probe_that_meets_passing_faults_is_repeated(fault: str) -> None:
    """A trainer does not fail to start because one answer was lost, or one request was sent twice below."""
    faults = iter([True, True, True, False, True])

    class Faulty(MemoryStore):
        def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
            if not next(faults, False):
                return super().put_if_absent(key, data)
            if fault != "refused":
                super().put_if_absent(key, data)
            if fault == "repeated":
                return False
            raise StoreUnavailable(f"put_if_absent {key}")

    slept: list[float] = []
    store, backoff = Faulty(), Backoff(sleep=slept.append)
    require_put_if_absent(store, backoff)
    assert len(slept) >= 2
    assert store_clock(store, backoff) > 0
    assert list(store.list_after("")) == []
    with pytest.raises(StoreUnavailable):
        require_put_if_absent(
            FaultStore(MemoryStore(), before=lambda *_: StoreUnavailable("503")), Backoff(deadline=0)
        )


def test_what_goes_on_the_wire_is_the_body_and_its_hash() -> None:
    """FIELD_REPORTS: boto3#4392, #4435: no checksum header or trailer that other servers would store or refuse."""
    with ScriptedServer(lambda request: Reply()) as server:
        store = store_at(server.url)
        store.put("a/b", memoryview(b"some body"))
        assert store.put_if_absent("a/c", bytearray(b"other body"))
    for request, body in zip(server.requests, (b"some body", b"other body"), strict=True):
        names = {name.lower() for name in request.headers}
        assert request.body == body
        assert request.headers["X-Amz-Content-SHA256"] == hashlib.sha256(body).hexdigest()
        assert not [
            name for name in names if "checksum" in name or name in ("content-encoding", "x-amz-trailer")
        ]
    assert [request.path for request in server.requests] == ["/bucket/runs/1/a/b", "/bucket/runs/1/a/c"]


def test_even_a_large_object_is_one_put() -> None:
    """Completing a multipart upload is conditional on few servers, and on some of those lets two writers win."""
    with ScriptedServer(lambda request: Reply()) as server:
        assert store_at(server.url).put_if_absent("k", bytes(65 << 20))
        assert [(one.method, one.path, len(one.body)) for one in server.requests] == [
            ("PUT", "/bucket/runs/1/k", 65 << 20)
        ]


@pytest.mark.parametrize("announce", [11, 1 << 20])
def test_a_body_that_ends_early_is_a_passing_fault(announce: int) -> None:
    """FIELD_REPORTS: vmlx-swift#217: never a shorter object, never zeros."""
    with ScriptedServer(lambda request: Reply(200, b"0123456789", announce=announce)) as server:
        with pytest.raises(StoreUnavailable):
            store_at(server.url).get("k", limit=1 << 20)
        with pytest.raises(StoreUnavailable):
            store_at(server.url).get_range("k", 0, announce)


def test_a_body_that_is_longer_than_announced_is_a_passing_fault() -> None:
    """As from a proxy that sends on in chunks, and with the length of something else."""
    chunked = {"Transfer-Encoding": "chunked"}
    reply = Reply(200, b"a\r\n0123456789\r\n0\r\n\r\n", chunked, announce=5)
    with ScriptedServer(lambda request: reply) as server:
        with pytest.raises(StoreUnavailable, match="the body ended after 6 of 5 bytes"):
            store_at(server.url).get("k", limit=100)
        with pytest.raises(StoreUnavailable):
            store_at(server.url).get_range("k", 0, 5)


DATED = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
WHOLE: list[tuple[str, Reply, Callable[[S3Store], object], object]] = [
    ("get", Reply(200, b"0123456789"), lambda store: store.get("k", limit=20), b"0123456789"),
    ("get-range", Reply(206, b"345"), lambda store: store.get_range("k", 3, 3), b"345"),
    ("head", Reply(200, b"0", DATED), lambda store: store.head("k") is not None, True),
    ("list", listing("runs/1/a"), lambda store: [info.key for info in store.list_after("")], ["a"]),
    ("created", Reply(200), lambda store: store.put_if_absent("k", b"x"), True),
    ("taken", s3_error("PreconditionFailed", 412), lambda store: store.put_if_absent("k", b"x"), False),
]


@pytest.mark.filterwarnings("ignore::dateutil.parser.UnknownTimezoneWarning")  # half a date
@pytest.mark.parametrize(
    ("reply", "call", "truth"), [one[1:] for one in WHOLE], ids=[one[0] for one in WHOLE]
)
def test_an_answer_that_is_cut_anywhere_is_understood_or_a_passing_fault(
    reply: Reply, call: Callable[[S3Store], object], truth: object
) -> None:
    """Also in its head, which http.client takes for whole: no object and no listing is empty because of that."""
    cut = [reply]
    with ScriptedServer(lambda request: cut[0]) as server:
        store = store_at(server.url)
        assert call(store) == truth
        for sent in itertools.count():
            cut[0] = replace(reply, sent=sent)
            try:
                assert call(store) == truth, f"after {sent} bytes"
            except StoreUnavailable:
                understood = False
                continue
            understood = True
            if sent > 400:
                break
    assert understood


def test_a_huge_object_is_refused_before_it_is_read() -> None:
    huge = ScriptedServer(lambda request: Reply(200, b"0123", announce=1 << 40))
    with huge as server, pytest.raises(LimitExceeded, match=str(1 << 40)):
        store_at(server.url).get("k", limit=1000)


def test_a_server_that_ignores_ranges_is_refused() -> None:
    with ScriptedServer(lambda request: Reply(200, b"0123456789")) as server:
        for start, length in ((0, 5), (3, 10)):
            with pytest.raises(StoreUnsuitable, match="ignores the Range"):
                store_at(server.url).get_range("k", start, length)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (ERROR_IN_200, StoreUnavailable),
        (Reply(200, b"<ListBucketResult><Contents>"), StoreUnavailable),
        (listing(truncated=True), StoreUnavailable),
        (listing("runs/1/b", "runs/1/a"), StoreUnsuitable),
        (listing("runs/1/a", "runs/1/a"), StoreUnsuitable),
    ],
    ids=["error-in-200", "cut", "endless", "unordered", "repeating"],
)
def test_a_listing_that_makes_no_sense_is_an_error(reply: Reply, expected: type[StoreError]) -> None:
    with ScriptedServer(lambda request: reply) as server, pytest.raises(expected):
        list(store_at(server.url).list_after(""))


def test_an_answer_without_its_fields_is_a_passing_fault() -> None:
    with ScriptedServer(lambda request: Reply(200, b"data")) as server:
        with pytest.raises(StoreUnavailable, match="LastModified"):
            store_at(server.url).head("k")
        assert store_at(server.url).get("k", limit=4) == b"data"


def test_listings_leave_out_names_that_are_no_keys() -> None:
    found = listing("runs/1/.tmp-x", "runs/1/a b", "runs/1/a/", "runs/1/ok")
    with ScriptedServer(lambda request: found) as server:
        assert [info.key for info in store_at(server.url).list_after("")] == ["ok"]


def credentials_file(path: Path, key: str) -> None:
    path.write_text(
        f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = t\n"
    )


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
def test_rotated_credentials_are_read_after_the_old_ones_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """FIELD_REPORTS: s3fs#632, botocore#3117: a long-running daemon outlives its first credentials."""
    file = tmp_path / "credentials"
    credentials_file(file, "OLD")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def respond(request: Request) -> Reply:
        return s3_error(code, 403) if "Credential=OLD/" in request.headers["Authorization"] else Reply()

    with ScriptedServer(respond) as server:
        store = store_at(server.url)
        expected = CredentialsExpired if code == "ExpiredToken" else AccessDenied
        with pytest.raises(expected):
            store.put("k", b"")
        credentials_file(file, "NEW")
        store.put("k", b"")


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"])
def test_credentials_that_cannot_be_sent_are_not_shown_and_looked_for_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "open\nsesame")
    with ScriptedServer(lambda _: Reply()) as server:
        store = store_at(server.url)
        with pytest.raises(AccessDenied, match="cannot be sent") as caught:
            store.put("k", b"")
        told = "".join(traceback.format_exception(caught.value))
        assert "sesame" not in told + str(caught.value)
        assert not server.requests
        monkeypatch.setenv(name, "opensesame")
        store.put("k", b"")


def test_expired_credentials_are_retried_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD_REPORTS: s3fs#632, botocore#3117: refreshed, retried, visible."""
    file = tmp_path / "credentials"
    credentials_file(file, "OLD")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    seen: list[str] = []

    def respond(request: Request) -> Reply:
        if "Credential=OLD/" not in request.headers["Authorization"]:
            return Reply(200, b"body", {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"})
        # As AWS answers: a GET with a document, a HEAD with nothing but 400.
        return Reply(400) if request.method == "HEAD" else s3_error("ExpiredToken", 400)

    with ScriptedServer(respond) as server:
        backoff = Backoff(sleep=lambda seconds: credentials_file(file, "NEW"))
        store = RetryStore(
            store_at(server.url), backoff, on_retry=lambda operation, error: seen.append(error.kind)
        )
        assert store.get("k", limit=10) == b"body"
        assert seen == ["credentials_expired"]
        credentials_file(file, "OLD")
        fresh = RetryStore(
            store_at(server.url), backoff, on_retry=lambda operation, error: seen.append(error.kind)
        )
        info = fresh.head("k")
        assert info is not None
        assert info.size == 4
        assert seen == ["credentials_expired"] * 2


def test_a_forked_child_makes_its_own_connections() -> None:
    """Two processes writing to one connection would answer each other's requests."""
    with ScriptedServer(lambda request: Reply()) as server:
        store = store_at(server.url)
        store.put("parent", b"")
        child = multiprocessing.get_context("fork").Process(target=store.put, args=("child", b""))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        store.put("parent", b"")
    connections = [(os.path.basename(request.path), request.connection) for request in server.requests]
    assert [name for name, _ in connections] == ["parent", "child", "parent"]
    assert connections[0] == connections[2]
    assert connections[1][1] != connections[0][1]


def test_a_missing_bucket_is_named(s3_server: EmbeddedS3Server) -> None:
    store = S3Store("no-such-bucket", endpoint_url=s3_server.url, path_style=True)
    calls: list[Callable[[], object]] = [
        lambda: store.put("k", b""),
        lambda: store.put_if_absent("k", b""),
        lambda: store.get("k", limit=1),
        lambda: list(store.list_after("")),
    ]
    for call in calls:
        with pytest.raises(StoreUnsuitable, match=r"NoSuchBucket.*create the bucket"):
            call()


def test_a_store_never_sees_beyond_its_prefix(s3_server: EmbeddedS3Server) -> None:
    whole = S3Store(BUCKET, endpoint_url=s3_server.url, path_style=True)
    inner = S3Store(BUCKET, "beyond/a", endpoint_url=s3_server.url, path_style=True)
    for key in ("beyond/0", "beyond/a/k", "beyond/a0/k", "beyond/b"):
        whole.put(key, b"")
    assert [info.key for info in inner.list_after("")] == ["k"]
    assert inner.url == f"s3://{BUCKET}/beyond/a"
