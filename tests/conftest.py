"""Settings of the whole suite, and the S3 servers that its folders share."""

import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker run all tests of a file, or of a group that the file has named, and order the files."""
    order = dict(zip(_LONGEST, itertools.count(), strict=False))
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


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
