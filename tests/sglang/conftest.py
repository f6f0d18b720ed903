"""Real SGLang servers for tests: two that the whole session shares, and throwaway ones.

A server takes half a minute to a minute to start and 0.55 GB of memory per process, so a test that does not have to
break one uses a shared one.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from deltasync.demo.sglang_server import SglangOptions, SglangServer
from tests.sglang import oracle
from tests.support.tiny_models import save_qwen3, save_qwen3_moe

SGLANG_PYTHON: Final = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"

_TEST_TIMEOUT: Final = 900
"""Seconds; a test may be the one that starts a server, on a machine that is busy."""


class Served(NamedTuple):
    """A server and the checkpoint it holds."""

    server: SglangServer
    checkpoint: Path


StartServer = Callable[..., SglangServer]


def with_faults(folder: Path) -> dict[str, Any]:
    """Options of a server whose ranks fail where files in `folder` say (tests/sglang/faults), and write on two threads
    where there are two cores.
    """
    return {
        "environment": {"DELTASYNC_FAULTS": str(folder), "OMP_NUM_THREADS": "2"},
        "path": (Path(__file__).with_name("faults"),),
    }


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give each test here its time limit."""
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(_TEST_TIMEOUT))


@pytest.fixture(scope="session")
def dense_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3, untied."""
    return save_qwen3(tmp_path_factory.mktemp("dense") / "base", seed=1)


@pytest.fixture(scope="session")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE."""
    return save_qwen3_moe(tmp_path_factory.mktemp("moe") / "base", seed=2)


@pytest.fixture(scope="session")
def shared_dense_server(
    dense_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """The session's TP 1 server. Tests take `dense`, which is in a known state."""
    options = SglangOptions(python=SGLANG_PYTHON, model=dense_checkpoint)
    with SglangServer(options, tmp_path_factory.mktemp("server") / "dense.log") as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def shared_moe_server(
    moe_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """The session's TP 2 server. Tests take `moe`, which is in a known state."""
    options = SglangOptions(python=SGLANG_PYTHON, model=moe_checkpoint, tp_size=2)
    with SglangServer(options, tmp_path_factory.mktemp("server") / "moe.log") as server:
        yield server.wait_ready()


@pytest.fixture
def dense(shared_dense_server: SglangServer, dense_checkpoint: Path) -> Served:
    """A dense model on one rank, holding `dense_checkpoint` as version "default", serving, with an empty cache."""
    return reset(shared_dense_server, dense_checkpoint)


@pytest.fixture
def moe(shared_moe_server: SglangServer, moe_checkpoint: Path) -> Served:
    """A mixture of experts on two ranks, holding `moe_checkpoint` as version "default", serving, cache empty."""
    return reset(shared_moe_server, moe_checkpoint)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """`start_server(model, wait=True, **options of SglangOptions)`: a server of the test's own, to break."""
    with ExitStack() as stack:
        logs = iter(range(1000))

        def start(model: Path, *, wait: bool = True, **options: Any) -> SglangServer:
            settings = SglangOptions(python=SGLANG_PYTHON, model=model, **options)
            server = stack.enter_context(SglangServer(settings, tmp_path / f"server-{next(logs)}.log"))
            return server.wait_ready() if wait else server

        yield start


def reset(server: SglangServer, checkpoint: Path) -> Served:
    if not server.running:
        pytest.fail(f"a test before this one ended the shared server; its log is {server.log}")
    oracle.post(server, "/abort_request", abort_all=True)
    oracle.continue_generation(server)
    oracle.load_from_disk(server, checkpoint, version="default")
    oracle.flush_cache(server)
    return Served(server, checkpoint)
