"""A SeaweedFS of one's own: a real S3 server of another make than the embedded one, on 127.0.0.1."""

import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from deltasync.s3server import BUCKET, CREDENTIALS

_LIBC: Final = ctypes.CDLL(None)
_END_WITH_PARENT: Final = (1, signal.SIGKILL)  # PR_SET_PDEATHSIG
_START: Final = 60.0
"""Seconds after which it will not come up any more."""


@contextmanager
def seaweedfs(directory: Path) -> Iterator[str]:
    """The endpoint of a server that keeps its files in `directory`, has the bucket `BUCKET`, and checks `CREDENTIALS`.

    One process with master, volume server, filer and gateway. Killed at the end: an orderly stop takes 15 seconds. It
    ends with the thread that started it, too, should the tests be killed.
    """
    identity = {
        "name": "tests",
        "credentials": [
            {
                "accessKey": CREDENTIALS["AWS_ACCESS_KEY_ID"],
                "secretKey": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            }
        ],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    command = [
        str(Path(sys.executable).parent / "weed"), "-logtostderr", "server",
        f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.config={directory / 's3.json'}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.localSocket={directory / 's3.sock'}",
        f"-filer.localSocket={directory / 'filer.sock'}", "-master.volumeSizeLimitMB=64", "-volume.max=100",
        "-master.electionTimeout=1s", "-master.heartbeatInterval=100ms",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(
            command, cwd=directory, stdout=log, stderr=log, preexec_fn=lambda: _LIBC.prctl(*_END_WITH_PARENT)
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{ports['s3.port']}"
            _wait(process, url, directory / "log")
            yield url
        finally:
            process.kill()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Until an object can be written: the gateway answers before there is a volume to write to."""
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )
    give_up = time.monotonic() + _START
    while True:
        try:
            if not any(bucket["Name"] == BUCKET for bucket in client.list_buckets()["Buckets"]):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
            client.delete_object(Bucket=BUCKET, Key="ready")
            return
        except (BotoCoreError, ClientError) as error:
            if process.poll() is not None or time.monotonic() > give_up:
                text = log.read_text(errors="replace")[-2000:]
                raise AssertionError(f"SeaweedFS does not come up: {error}\n{text}") from error
            time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
