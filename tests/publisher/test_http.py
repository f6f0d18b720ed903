"""What a publisher process tells over HTTP, over a real socket, while a trainer comes, publishes and leaves."""

import json
import socket
import struct
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chunkstore.http import HttpConfig, StatusServer
from chunkstore.metrics import StoreMetrics
from chunkstore.open import StoreConfig, open_store
from publisher.frames import SOCKET
from publisher.metrics import PHASES
from publisher.publisher import Publisher
from publisher.report import Report
from tests.publisher.sidecars import WAIT, sidecar_thread, write_config
from tests.publisher.zoo import Zoo, adamw, train


class Client:
    def __init__(self, server: StatusServer) -> None:
        self._address = f"http://127.0.0.1:{server.port}"

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self._address + path, timeout=WAIT) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Samples by name without our prefix, labels behind a colon."""
        return {
            ":".join([sample.name.removeprefix("deltasync_"), *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(self.get("/metrics")[1])
            for sample in family.samples
        }


def test_a_trainers_versions_are_told(tmp_path: Path) -> None:
    config, metrics = write_config(tmp_path), StoreMetrics()
    report = Report(metrics)
    store = open_store(StoreConfig(url=str(tmp_path / "store")), metrics)
    with StatusServer(HttpConfig(port=0), report.answers()) as server:
        client = Client(server)
        assert client.get("/healthz") == (200, "ok\n")
        assert client.get("/readyz") == (503, "not ready: no trainer is connected\n")
        assert client.metrics()["publisher_committed_version"] == -1
        with sidecar_thread(config, store, report):
            model = Zoo()
            optimizer = adamw(model)
            with Publisher.attach(optimizer, model, config) as publisher:
                assert client.get("/readyz") == (200, "ready\n")
                assert client.metrics()["publisher_committed_version"] == 0
                train(model, optimizer)
                train(model, optimizer)
                commit = publisher.publish().result(WAIT)
                assert commit is not None
                first, stats = client.metrics(), commit.manifest.stats
                assert first["publisher_trainer_connected"] == first["publisher_committed_version"] == 1
                assert first["publisher_changed_fraction"] == pytest.approx(stats.changed / stats.elements)
                assert first["publisher_bits_per_changed_element"] == pytest.approx(
                    8 * commit.manifest.nbytes / stats.changed
                )
                assert first["publisher_optimizer_steps_total"] == 2
                assert first["publisher_versions_total"] == 2
                assert first["publisher_changed_elements_total"] == stats.elements + stats.changed
                assert first["publisher_uploaded_chunks_total"] >= 2
                encoded = [v for name, v in first.items() if name.startswith("publisher_encoded_bytes_total")]
                assert 0 < sum(encoded) < first["publisher_uploaded_bytes_total"]
                assert all(first[f"publisher_phase_seconds_count:{phase}"] >= 1 for phase in PHASES)
                assert first["store_written_bytes_total:put"] == first["publisher_uploaded_bytes_total"]
                status = json.loads(client.get("/status")[1])
                assert (status["trainer_connected"], status["committed_version"]) == (True, 1)
                assert status["committed_root"] == commit.manifest.root.hex()
                assert "<td>1<td>" in client.get("/")[1]
        assert client.get("/readyz")[0] == 503
        assert client.metrics()["publisher_trainer_connected"] == 0


def test_errors_are_counted_by_kind(tmp_path: Path) -> None:
    report = Report(StoreMetrics())
    with StatusServer(HttpConfig(port=0), report.answers()) as server:
        client = Client(server)
        with sidecar_thread(write_config(tmp_path), report=report), socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(tmp_path / "spool" / SOCKET))
            peer.sendall(struct.pack("<I", 1) + b"\xc0")
            while peer.recv(1 << 16):
                pass
        assert client.metrics()["publisher_errors_total:spool_invalid"] == 1
        error = json.loads(client.get("/status")[1])["last_error"]
        assert error["kind"] == "spool_invalid"
        assert "spool_invalid: " in client.get("/")[1]
