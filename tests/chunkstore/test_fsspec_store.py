"""Reading through fsspec what was written by a real store."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from chunkstore.errors import (
    AccessDenied,
    CorruptObject,
    InvalidKey,
    LimitExceeded,
    ObjectMissing,
    StoreUnavailable,
    StoreUnsuitable,
)
from chunkstore.fsspec_store import FsspecStore, modified
from chunkstore.posix import PosixStore
from chunkstore.s3 import S3Store
from chunkstore.store import Store
from deltasync.s3server import BUCKET, CREDENTIALS, EmbeddedS3Server
from tests.support.scripted import Reply, ScriptedServer


@pytest.fixture(params=["local", "s3"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, FsspecStore]:
    """A store to write with, and the read-only view of the same objects."""
    if request.param == "local":
        return PosixStore(tmp_path / "root"), FsspecStore(f"local://{tmp_path}/root")
    server: EmbeddedS3Server = request.getfixturevalue("s3_server")
    prefix = f"fsspec/{tmp_path.name}"
    view = FsspecStore(
        f"s3://{BUCKET}/{prefix}",
        key=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=server.url,
    )
    return S3Store(BUCKET, prefix, endpoint_url=server.url, path_style=True), view


def test_it_reads_what_the_store_wrote(pair: tuple[Store, FsspecStore]) -> None:
    writer, view = pair
    writer.put("a/b", b"0123456789")
    assert view.get("a/b", limit=10) == b"0123456789"
    assert view.get_range("a/b", 2, 3) == b"234"
    assert view.get_range("a/b", 10, 0) == b""
    found, expected = view.head("a/b"), writer.head("a/b")
    assert found is not None
    assert expected is not None
    assert (found.key, found.size) == ("a/b", 10)
    assert abs(found.modified - expected.modified) < 2
    with pytest.raises(LimitExceeded):
        view.get("a/b", limit=9)
    for start, length in ((5, 6), (10, 1), (11, 0)):
        with pytest.raises(CorruptObject):
            view.get_range("a/b", start, length)
    assert view.head("gone") is view.head("a") is None
    with pytest.raises(ObjectMissing, match="gone"):
        view.get("gone", limit=1)
    with pytest.raises(InvalidKey):
        view.get("../gone", limit=1)


def test_it_lists_like_the_store_and_never_from_a_cache(pair: tuple[Store, FsspecStore]) -> None:
    """FIELD_REPORTS: s3fs#851, #879, #424: a directory listed once shows what was added since."""
    writer, view = pair
    assert list(view.list_after("v/")) == []
    for key in ("v/1", "v/2", "v/2.a/x", "v-0", "w", "v/2a"):
        writer.put(key, b"x")
        assert view.head(key) is not None
    for prefix, after in (
        ("", ""),
        ("v/", ""),
        ("v/2", ""),
        ("v/2.a/", ""),
        ("", "v/2"),
        ("v/", "v/2.a/x"),
        ("x", ""),
    ):
        assert [(i.key, i.size) for i in view.list_after(prefix, after)] == [
            (i.key, i.size) for i in writer.list_after(prefix, after)
        ]
    writer.put("v/3", b"x")
    assert [info.key for info in view.list_after("v/", "v/2a")] == ["v/3"]
    writer.delete("v/3")
    assert view.head("v/3") is None
    assert list(view.list_after("v/1/")) == []


def test_every_write_is_refused_with_a_hint(pair: tuple[Store, FsspecStore]) -> None:
    """FIELD_REPORTS: minio#21603, juicefs gateway, as fsspec has it: its exclusive creation is not atomic."""
    _, view = pair
    calls: list[Callable[[], object]] = [
        lambda: view.put("k", b""),
        lambda: view.put_if_absent("k", b""),
        lambda: view.delete("k"),
    ]
    for call in calls:
        with pytest.raises(StoreUnsuitable, match=r"only for reading .*s3://bucket/prefix"):
            call()
    assert list(view.list_after("")) == []


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (PermissionError("no"), AccessDenied),
        (TimeoutError("slow"), StoreUnavailable),
        (RuntimeError("what a client library raises"), StoreUnavailable),
        (IsADirectoryError("d"), ObjectMissing),
    ],
)
def test_errors_of_the_file_system_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception]
) -> None:
    import fsspec.implementations.local as local

    def failing(*args: object, **kwargs: object) -> None:
        raise raised

    monkeypatch.setattr(local.LocalFileSystem, "info", failing)
    with pytest.raises(expected, match=f"get local://{tmp_path}/k"):
        FsspecStore(f"local://{tmp_path}").get("k", limit=1)


def test_messages_never_hold_the_credentials_of_a_url() -> None:
    assert FsspecStore("http://host/base/?signature=secret").url == "http://host/base"
    store = FsspecStore("http://user:password@127.0.0.1:9/base")
    assert store.url == "http://127.0.0.1:9/base"
    with pytest.raises(StoreUnavailable, match=r"get http://127\.0\.0\.1:9/base/k") as caught:
        store.get("k", limit=1)
    assert "password" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "expected"), [(404, ObjectMissing), (500, StoreUnavailable), (0, StoreUnavailable)]
)
def test_only_404_means_missing_over_http(status: int, expected: type[Exception]) -> None:
    """The file system itself calls everything that goes wrong "not found"."""
    with ScriptedServer(lambda request: Reply(status)) as server, pytest.raises(expected):
        FsspecStore(server.url).get("k", limit=1)


def test_an_object_over_http() -> None:
    with ScriptedServer(lambda request: Reply(200, b"data", {"Accept-Ranges": "bytes"})) as server:
        assert FsspecStore(server.url).get("k", limit=4) == b"data"
        assert server.requests[-1].path == "/k"


def test_times_in_every_form_file_systems_give_them() -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    for info in (
        {"mtime": when.timestamp()},
        {"LastModified": when},
        {"last_modified": when.replace(tzinfo=None)},
        {"updated": "2026-01-02T03:04:05Z"},
        {"mtime": None, "created": when},
    ):
        assert modified(info) == when.timestamp()
    assert modified({}) == modified({"updated": "yesterday"}) == 0.0
