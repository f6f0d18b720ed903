"""The HTTP server: probes, status, metrics and the page, over a real socket."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chunkstore.errors import ConfigError
from chunkstore.http import HttpConfig
from chunkstore.memory import MemoryStore
from subscriber.daemon import Subscriber
from tests.subscriber.parts import TIMEOUT, Worker, running, small_weights, until
from tests.support.streams import StreamBuilder


def get(subscriber: Subscriber, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{subscriber.http_port}{path}", timeout=TIMEOUT
        ) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(subscriber: Subscriber) -> dict[str, float]:
    """Samples by name, labels behind a colon."""
    out = {}
    for family in text_string_to_metric_families(get(subscriber, "/metrics")[1]):
        for sample in family.samples:
            out[":".join([sample.name, *sample.labels.values()])] = sample.value
    return out


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    return Worker(tmp_path, builder, http=HttpConfig(port=0), audit_every=1)


def test_ready_only_while_a_verified_version_is_served(worker: Worker) -> None:
    """FIELD_REPORTS: miles#1724, AReaL#1726."""
    chunk = worker.builder.manifests[0].chunks[0].key
    data = worker.builder.store.get(chunk, limit=1 << 20)
    worker.builder.store.delete(chunk)
    with running(worker.subscriber) as subscriber:
        until(lambda: subscriber.report.status().last_error is not None)
        assert get(subscriber, "/healthz") == (200, "ok\n")
        code, text = get(subscriber, "/readyz")
        assert code == 503
        assert "no verified version" in text
        assert metrics(subscriber)["deltasync_subscriber_ready"] == 0
        worker.builder.store.put(chunk, data)
        subscriber.wait_for(0, TIMEOUT)
        assert get(subscriber, "/readyz") == (200, "ready\n")
        assert get(subscriber, "/nothing")[0] == 404


def test_status_and_metrics_tell_what_happened(worker: Worker) -> None:
    builder = worker.builder
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        builder.train(steps=2)
        subscriber.wait_for(2, TIMEOUT)
        until(lambda: metrics(subscriber).get("deltasync_subscriber_audits_total:ok", 0) >= 1)
        status = json.loads(get(subscriber, "/status")[1])
        assert (status["state"], status["applied_version"], status["newest_version"]) == ("serving", 2, 2)
        assert status["applied_root"] == builder.manifests[2].root.hex()
        assert status["needs_version"] == 2
        seen = metrics(subscriber)
        assert (
            seen["deltasync_subscriber_applied_version"] == seen["deltasync_subscriber_newest_version"] == 2
        )
        assert seen["deltasync_subscriber_lag_versions"] == seen["deltasync_subscriber_lag_seconds"] == 0
        assert seen["deltasync_subscriber_versions_total"] == 3
        assert seen["deltasync_subscriber_fetched_bytes_total"] >= sum(m.nbytes for m in builder.manifests)
        assert seen["deltasync_subscriber_changed_elements_total"] > 0
        for phase in ("detect", "fetch", "stage", "prepare", "scatter", "pause", "audit"):
            assert seen[f"deltasync_subscriber_phase_seconds_count:{phase}"] >= 1
        assert seen["deltasync_store_calls_total:get"] > 0
        page = get(subscriber, "/")[1]
        assert "<td>2<td>" in page
        assert "serving" in page


def test_lag_is_counted_from_the_oldest_version_that_is_missing(worker: Worker) -> None:
    """FIELD_REPORTS: prime-rl#3026: the lag metric tells."""
    builder = worker.builder
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        manifest = builder.train()
        for chunk in manifest.chunks:
            builder.store.delete(chunk.key)
        builder.train()
        until(lambda: subscriber.report.status().newest_version == 2 and worker.refused() != [])
        seen = metrics(subscriber)
        assert seen["deltasync_subscriber_lag_versions"] == 2
        assert seen["deltasync_subscriber_lag_seconds"] > 1e6  # these manifests were made long ago
        assert seen["deltasync_subscriber_errors_total:object_missing"] >= 1
        assert seen["deltasync_subscriber_refused_versions"] >= 1
        assert "object_missing" in get(subscriber, "/")[1]


def test_a_port_in_use_is_a_config_error(worker: Worker) -> None:
    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        other = worker.config.model_copy(
            update={"id": "other", "http": HttpConfig(port=subscriber.http_port or 0)}
        )
        second = Subscriber(other, worker.engine)
        second.start()
        with pytest.raises(ConfigError, match="cannot listen"):
            second.wait_for(0, TIMEOUT)
