"""Settings of the whole suite, and the S3 servers that its folders share."""

import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
import torch

from deltasync.s3server import CREDENTIALS, EmbeddedS3Server

# How long an example takes says how busy the machine is, and nothing about the code.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

# Workers share two cores; threads that wait for each other cost more than they bring. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
torch.set_num_threads(1)

# What looks into SGLang, Megatron-Core or DeepSpeed needs it in its own process: `make test` runs those tests in
# environments that have it.
collect_ignore = [
    tests
    for module, tests in (("sglang", "sglang_trace"), ("megatron", "megatron"), ("deepspeed", "deepspeed"))
    if importlib.util.find_spec(module) is None
]
if "sglang_trace" not in collect_ignore:
    # There, SGLang's modules can be imported as in the servers of deltasync.demo.sglang_server.
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1", CUDA_VISIBLE_DEVICES="")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deltasync" / "demo" / "sglang_cpu"))
    importlib.import_module("sitecustomize")
if "deepspeed" not in collect_ignore:
    # On the CPU, with the kernels and the compiler's helper that `make venv-deepspeed` has put there.
    here = Path(sys.prefix)
    os.environ.update(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(here / "kernels"))
    os.environ["PATH"] = f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}"


_LONGEST: Final = ("sglang", "e2e", "trainers")
"""Folders whose files take minutes each: begun first, or one worker would be at work long after the others."""
_SHARING: Final = {
    f"tests/sglang/test_{name}.py"
    for name in ("apply", "daemon", "environment", "following", "refusals", "smoke")
}
"""Files that use the two servers of the session: one worker starts those, and runs all these files."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = dict(zip(_LONGEST, itertools.count(), strict=False))
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give files to workers as `--dist loadfile` does, except that those which share servers stay together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "servers" if file in _SHARING else file

    return Scheduling(config, log)


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


@pytest.fixture(scope="session")
def seaweedfs(aws: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a second real S3 server."""
    from tests.support import seaweed  # boto3 is not in SGLang's environment

    with seaweed.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as endpoint:
        yield endpoint


@pytest.fixture(params=["moto", "seaweedfs"])
def s3_endpoint(request: pytest.FixtureRequest) -> str:
    """Of each S3 server in turn; both have the bucket `BUCKET`."""
    if request.param == "seaweedfs":
        endpoint: str = request.getfixturevalue("seaweedfs")
        return endpoint
    server: EmbeddedS3Server = request.getfixturevalue("s3_server")
    return server.url
