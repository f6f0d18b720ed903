"""Stores of every kind for the tests of this folder."""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.s3.models import S3Backend

from chunkstore.memory import MemoryStore
from chunkstore.open import StoreConfig, open_store
from chunkstore.posix import PosixStore
from chunkstore.s3 import S3Store
from chunkstore.store import Store
from deltasync.s3server import BUCKET, EmbeddedS3Server

KINDS = ("memory", "posix", "s3", "seaweedfs")


def _endpoint(request: pytest.FixtureRequest, kind: str) -> str:
    if kind == "seaweedfs":
        endpoint: str = request.getfixturevalue("seaweedfs")
        return endpoint
    server: EmbeddedS3Server = request.getfixturevalue("s3_server")
    return server.url


@pytest.fixture
def config_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], StoreConfig]:
    """The configuration of a new, empty store of the given kind."""

    def config(kind: str) -> StoreConfig:
        name = uuid.uuid4().hex
        if kind == "memory":
            return StoreConfig(url=f"memory://{name}")
        if kind == "posix":
            return StoreConfig(url=(tmp_path / name).as_uri())
        endpoint = _endpoint(request, kind)
        return StoreConfig(url=f"s3://{BUCKET}/tests/{name}", endpoint_url=endpoint, path_style=True)

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
        endpoint = _endpoint(request, kind)
        return S3Store(BUCKET, f"tests/{name}", endpoint_url=endpoint, path_style=True, page=3)

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


@pytest.fixture
def waiting_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold every put, once its check has passed, until a second one has come as far; for at most 0.3 seconds."""
    together = threading.Semaphore(0), threading.Semaphore(0)
    turn = iter(range(1_000_000))
    real = S3Backend.put_object

    def put_object(self: S3Backend, *args: Any, **kwargs: Any) -> Any:
        mine = next(turn) % 2
        together[1 - mine].release()
        together[mine].acquire(timeout=0.3)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(S3Backend, "put_object", put_object)


@pytest.fixture
def plain_moto(s3_server: EmbeddedS3Server) -> Iterator[str]:
    """The endpoint of moto as it is; it shares its buckets with `s3_server`, both being in this process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # or it logs every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
