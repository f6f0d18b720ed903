"""Stores of every kind for the tests of this folder."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chunkstore.memory import MemoryStore
from chunkstore.open import StoreConfig, open_store
from chunkstore.posix import PosixStore
from chunkstore.s3 import S3Store
from chunkstore.store import Store
from deltasync.s3server import BUCKET, CREDENTIALS, EmbeddedS3Server

KINDS = ("memory", "posix", "s3")


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Credentials of the embedded server, and nothing else from the AWS chain of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        absent = tmp_path_factory.mktemp("aws") / "absent"
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, str(absent))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("NO_PROXY", "127.0.0.1")
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def s3_server(aws: None) -> Iterator[EmbeddedS3Server]:
    with EmbeddedS3Server() as server:
        yield server


@pytest.fixture
def config_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], StoreConfig]:
    """The configuration of a new, empty store of the given kind."""

    def config(kind: str) -> StoreConfig:
        name = uuid.uuid4().hex
        if kind == "memory":
            return StoreConfig(url=f"memory://{name}")
        if kind == "posix":
            return StoreConfig(url=(tmp_path / name).as_uri())
        server: EmbeddedS3Server = request.getfixturevalue("s3_server")
        return StoreConfig(url=f"s3://{BUCKET}/tests/{name}", endpoint_url=server.url, path_style=True)

    return config


@pytest.fixture
def raw_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Store]:
    """A new, empty store of the given kind, without decorators; s3 lists three keys a page, so that paging is used."""

    def make(kind: str) -> Store:
        name = uuid.uuid4().hex
        if kind == "memory":
            return MemoryStore(name)
        if kind == "posix":
            return PosixStore(tmp_path / name)
        server: EmbeddedS3Server = request.getfixturevalue("s3_server")
        return S3Store(BUCKET, f"tests/{name}", endpoint_url=server.url, path_style=True, page=3)

    return make


@pytest.fixture(params=[*KINDS, *(f"open-{kind}" for kind in KINDS)])
def store(
    request: pytest.FixtureRequest,
    raw_store: Callable[[str], Store],
    config_of: Callable[[str], StoreConfig],
) -> Store:
    """A new, empty store of every kind: bare, and as `open_store` wraps it in all decorators."""
    kind: str = request.param
    if kind.startswith("open-"):
        return open_store(config_of(kind.removeprefix("open-")))
    return raw_store(kind)
