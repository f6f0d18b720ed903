"""Which stream a run uses."""

from pathlib import Path

import pytest

from chunkstore.errors import ConfigError
from deltasync.demo.store import open_demo_store


@pytest.mark.parametrize(
    ("kind", "url", "endpoint", "expected"),
    [
        ("posix", None, None, "{work}/store"),
        ("posix", "/data/streams/", None, "/data/streams/demo-"),
        ("posix", "file:///data", None, "file:///data/demo-"),
        ("s3", "s3://bucket/prefix", None, "s3://bucket/prefix/demo-"),
        ("s3", "s3://bucket", "http://localhost:9000", "s3://bucket/demo-"),
    ],
)
def test_stream(kind: str, url: str | None, endpoint: str | None, expected: str, tmp_path: Path) -> None:
    with (
        open_demo_store(kind, url, endpoint, tmp_path) as store,
        open_demo_store(kind, url, endpoint, tmp_path) as another,
    ):
        assert store.config.url.startswith(expected.format(work=tmp_path))
        assert store.config.endpoint_url == endpoint
        assert store.config.path_style == (endpoint is not None)
        assert store.environment == {}
        assert (store.config.url != another.config.url) == (url is not None), "runs do not share a stream"


@pytest.mark.parametrize(
    ("kind", "url", "endpoint"),
    [
        ("posix", "s3://bucket/prefix", None),
        ("s3", "/data", None),
        ("posix", None, "http://localhost:9000"),
        ("s3", None, "http://localhost:9000"),
        ("posix", "/data", "http://localhost:9000"),
        ("s3", "s3://", None),
        ("s3", "s3://bucket", "localhost:9000"),
    ],
)
def test_options_that_do_not_fit(kind: str, url: str | None, endpoint: str | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--|command line"), open_demo_store(kind, url, endpoint, tmp_path):
        pass


def test_a_relative_path_is_the_same_to_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_demo_store("posix", "streams", None, tmp_path) as store:
        assert store.config.url.startswith(f"{tmp_path}/streams/demo-")
