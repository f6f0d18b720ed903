"""The embedded S3 server: as a process of its own, and in one that goes on afterwards."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from chunkstore.errors import StoreUnavailable
from chunkstore.s3 import S3Store
from deltasync.s3server import BUCKET, EmbeddedS3Server, OneAtATime, main

pytestmark = pytest.mark.usefixtures("aws")


def test_it_runs_as_a_process_and_stops_on_sigterm() -> None:
    command = [sys.executable, "-m", "deltasync.s3server", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        store = S3Store(BUCKET, "p", endpoint_url=url, path_style=True)
        assert store.put_if_absent("k", b"data")
        assert store.get("k", limit=4) == b"data"
        os.kill(process.pid, signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "", ""), (
        "requests are not logged: the demo has the terminal"
    )


def test_a_closed_server_is_gone_and_closing_twice_is_fine() -> None:
    with EmbeddedS3Server() as server:
        url = server.url
    server.close()
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.url
    with pytest.raises(StoreUnavailable):
        S3Store(BUCKET, endpoint_url=url, path_style=True).put("k", b"")


def test_a_port_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["http"]) == 2
    assert "usage" in capsys.readouterr().err


def test_a_client_that_is_slow_to_send_holds_up_nobody() -> None:
    """Its body is awaited before its turn."""
    slow_reads = threading.Event()
    served: list[str] = []

    class SlowBody:
        def read(self, length: int) -> bytes:
            assert slow_reads.wait(30)
            return b"x" * length

    class Body:
        def read(self, length: int) -> bytes:
            return b""

    def application(environ: dict[str, object], start_response: object) -> list[bytes]:
        served.append(str(environ["PATH_INFO"]))
        return [b"ok"]

    server = OneAtATime(application)

    def request(path: str, body: object, length: str) -> None:
        environ = {"PATH_INFO": path, "CONTENT_LENGTH": length, "wsgi.input": body}
        server(environ, lambda status, headers, exc_info=None: lambda data: None)

    slow = threading.Thread(target=request, args=("/slow", SlowBody(), "5"))
    slow.start()
    request("/quick", Body(), "")
    assert served == ["/quick"]
    slow_reads.set()
    slow.join(30)
    assert served == ["/quick", "/slow"]


def test_a_request_that_is_cut_off_changes_nothing() -> None:
    """moto would store what there is of it."""
    with EmbeddedS3Server() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            head = f"PUT /{BUCKET}/cut HTTP/1.1\r\nHost: {host}\r\nContent-Length: 10\r\n\r\n"
            client.sendall(head.encode() + b"01234")
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        assert S3Store(BUCKET, endpoint_url=server.url, path_style=True).head("cut") is None
