"""From a configuration to a store, and what importing this package costs."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from chunkstore.errors import ConfigError, StoreUnsuitable
from chunkstore.metrics import StoreMetrics
from chunkstore.open import StoreConfig, open_store


@pytest.mark.parametrize("form", ["file://{}", "file://localhost{}", "{}"])
def test_a_directory_by_url_or_path(tmp_path: Path, form: str) -> None:
    store = open_store(StoreConfig(url=form.format(tmp_path / "a-b")))
    store.put("k", b"data")
    assert (tmp_path / "a-b/k").read_bytes() == b"data"
    assert store.url == (tmp_path / "a-b").as_uri()


def test_a_file_url_is_decoded_and_a_path_is_not(tmp_path: Path) -> None:
    open_store(StoreConfig(url=(tmp_path / "a b").as_uri())).put("k", b"")
    open_store(StoreConfig(url=str(tmp_path / "a%20c"))).put("k", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b", "a%20c"]


def test_memory_is_shared_by_name() -> None:
    open_store(StoreConfig(url="memory://open-test")).put("k", b"data")
    assert open_store(StoreConfig(url="memory://open-test")).get("k", limit=4) == b"data"
    assert open_store(StoreConfig(url="memory://open-test-2")).head("k") is None


def test_s3_says_where_it_is_and_connects_to_nothing_yet() -> None:
    store = open_store(StoreConfig(url="s3://bucket/some/prefix/", endpoint_url="http://127.0.0.1:1"))
    assert store.url == "s3://bucket/some/prefix"
    assert open_store(StoreConfig(url="s3://bucket")).url == "s3://bucket"


def test_the_store_is_counted_limited_and_retried(tmp_path: Path) -> None:
    metrics = StoreMetrics()
    open_store(StoreConfig(url=str(tmp_path)), metrics).put("k", b"data")
    assert metrics.snapshot()["put"].bytes_written == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": ""}, "at least 1 character"),
        ({"url": "s3:///prefix"}, "needs a bucket"),
        ({"url": "s3://key:secret@bucket/prefix"}, "credentials do not go here"),
        ({"url": "s3://bucket/a/../b"}, "segment"),
        ({"url": "s3://bucket/a//b"}, "segment"),
        ({"url": "file://relative/path"}, "absolute"),
        ({"url": "relative/path"}, "neither an absolute path nor a URL"),
        ({"url": "s3:/bucket/prefix"}, "neither an absolute path nor a URL"),
        ({"url": "/tmp/x", "endpoint_url": "http://h"}, "only for s3://"),
        ({"url": "/tmp/x", "path_style": True}, "only for s3://"),
        ({"url": "s3://b/p", "endpoint_url": "host:9000"}, "http://host:port"),
        ({"url": "s3://b/p", "endpoint_url": "http://user:pass@host"}, "http://host:port"),
        ({"url": "s3://b/p", "concurrency": 0}, "greater than or equal to 1"),
        ({"url": "s3://b/p", "read_timeout": 0}, "greater than 0"),
        ({"url": "s3://b/p", "retries": 3}, "not permitted"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        StoreConfig.model_validate(fields)


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(ConfigError, match=r"gopher.*check the scheme"):
        open_store(StoreConfig(url="gopher://host/path"))


def test_any_other_url_is_for_reading_only(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"data")
    store = open_store(StoreConfig(url=f"local://{tmp_path}"))
    assert store.get("k", limit=4) == b"data"
    with pytest.raises(StoreUnsuitable):
        store.put("k", b"")


def test_importing_the_package_loads_no_client_library(tmp_path: Path) -> None:
    program = f"""
import sys, pkgutil, importlib, chunkstore
import chunkstore.open, chunkstore.config, chunkstore.probe
store = chunkstore.open.open_store(chunkstore.open.StoreConfig(url={str(tmp_path)!r}))
store.put("k", b"")
heavy = {{"boto3", "botocore", "fsspec", "s3fs", "torch", "moto"}} & set(sys.modules)
sys.exit(f"loaded: {{heavy}}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_missing_client_library_is_an_error_that_says_what_to_install() -> None:
    program = """
import sys
sys.modules["boto3"] = None
from chunkstore.errors import ConfigError
from chunkstore.open import StoreConfig, open_store
try:
    open_store(StoreConfig(url="s3://bucket/prefix"))
except ConfigError as error:
    sys.exit(0 if "extra 's3'" in str(error) and "boto3" in str(error) else str(error))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
