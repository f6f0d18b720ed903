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
from subscriber.errors import EngineFailed
from subscriber.fleet import Fleet
from tests.subscriber.parts import TIMEOUT, RemoteEngine, Worker, running, small_weights, until
from tests.support.streams import StreamBuilder


def get(subscriber: Fleet, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{subscriber.http_port}{path}", timeout=TIMEOUT
        ) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(subscriber: Fleet, part: str = "") -> dict[str, float]:
    """Samples by name, labels behind a colon."""
    out = {}
    for family in text_string_to_metric_families(get(subscriber, f"{part}/metrics")[1]):
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
        assert get(subscriber, "/nothing") == (404, "there are /, /healthz, /readyz, /status, /metrics\n")
        assert get(subscriber, "/servers/worker/readyz")[0] == 404


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
        # By the clock here: the publisher's, which dates the manifests, is years behind.
        assert 0 < seen["deltasync_subscriber_lag_seconds"] < TIMEOUT
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


@pytest.fixture
def fleet(worker: Worker) -> Fleet:
    engines = {name: RemoteEngine(worker.builder) for name in ("a", "b")}
    engines["b"].gone = EngineFailed("connection refused", hint="start it")
    return Fleet(worker.config, engines)


def test_several_are_ready_when_all_are_and_each_can_be_asked(fleet: Fleet) -> None:
    with running(fleet):
        until(lambda: fleet.reports["a"].ready and fleet.reports["b"].status().last_error is not None)
        code, text = get(fleet, "/readyz")
        assert (code, text) == (503, "not ready: b: no verified version has been loaded yet\n")
        assert get(fleet, "/servers/a/readyz") == (200, "ready\n")
        assert get(fleet, "/servers/b/readyz")[0] == 503
        assert get(fleet, "/healthz") == (200, "ok\n")
        for path in ("/servers/c/readyz", "/servers/readyz", "/servers/a", "/servers", "/servers/a/b/readyz"):
            code, text = get(fleet, path)
            assert code == 404
            assert "/servers/b/readyz" in text


def test_each_of_several_becomes_ready(worker: Worker) -> None:
    fleet = Fleet(worker.config, {name: RemoteEngine(worker.builder) for name in ("a", "b")})
    with running(fleet):
        fleet.wait_for(0, TIMEOUT)
        assert get(fleet, "/readyz") == get(fleet, "/servers/a/readyz") == (200, "ready\n")


def test_status_page_and_metrics_of_several(fleet: Fleet, worker: Worker) -> None:
    with running(fleet):
        until(lambda: fleet.versions["a"] == 0 and fleet.reports["b"].status().last_error is not None)
        worker.builder.train()
        until(lambda: fleet.versions["a"] == 1)

        status = json.loads(get(fleet, "/status")[1])
        assert status["id"] == "worker"
        assert {name: server["id"] for name, server in status["servers"].items()} == {
            "a": "worker.a",
            "b": "worker.b",
        }
        assert [status["servers"][name]["applied_version"] for name in "ab"] == [1, None]
        assert json.loads(get(fleet, "/servers/b/status")[1])["last_error"]["kind"] == "engine_failed"

        seen = metrics(fleet)
        assert seen["deltasync_subscriber_applied_version:a"] == 1
        assert seen["deltasync_subscriber_applied_version:b"] == -1
        assert seen["deltasync_subscriber_errors_total:engine_failed:b"] >= 1
        assert seen["deltasync_subscriber_phase_seconds_count:fetch:a"] == 2
        assert seen["deltasync_store_calls_total:get"] > 0
        types = [line for line in get(fleet, "/metrics")[1].splitlines() if line.startswith("# TYPE")]
        assert len(types) == len(set(types))  # Prometheus refuses a family that is given twice
        alone = metrics(fleet, "/servers/a")
        assert alone["deltasync_subscriber_applied_version"] == 1
        assert not any(name.startswith("deltasync_store") for name in alone)

        page = get(fleet, "/")[1]
        assert "serving version 1, behind: 0 versions" in page
        assert "held: no verified version" in page
        assert "<td>a<td>1<td>" in page
        assert "engine_failed" in get(fleet, "/servers/b/")[1]
