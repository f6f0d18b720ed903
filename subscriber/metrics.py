"""The subscriber's Prometheus metrics, in a registry of their own. Units are in the names."""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from chunkstore.metrics import StoreMetrics

_PREFIX: Final = "deltasync_subscriber_"
_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

PHASES: Final = ("detect", "fetch", "stage", "prepare", "scatter", "pause", "audit")
"""detect: from the commit to being seen; pause: how long nothing was served."""


class Metrics:
    """`lag`: versions and seconds behind, asked whenever the metrics are read."""

    def __init__(self, store: StoreMetrics, lag: Callable[[], tuple[int, float]]) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(_PREFIX + name, text, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        self.applied_version = gauge("applied_version", "Version the engine serves; -1: none")
        self.newest_version = gauge("newest_version", "Newest version seen in the store; -1: none")
        self.ready = gauge("ready", "1 while the engine serves a verified version")
        self.held_bytes = gauge("staged_bytes", "Size of the values staged last")
        self.refused = gauge("refused_versions", "Versions that were tried and could not be applied")
        gauge("lag_versions", "Versions between applied and newest").set_function(lambda: lag()[0])
        gauge("lag_seconds", "Age of the oldest version that is not applied").set_function(lambda: lag()[1])
        self.applies = counter("applies", "Versions reached, catch-ups counted once")
        self.versions = counter("versions", "Versions taken in, those passed over in a catch-up included")
        self.fetched_bytes = counter("fetched_bytes", "Chunk bytes fetched from the store")
        self.changed_elements = counter("changed_elements", "Elements whose bits an apply changed")
        self.written_elements = counter("written_elements", "Elements written into the engine")
        self.polls = counter("polls", "Looks for a new version")
        self.retries = counter("retries", "Tries repeated after an error, by its kind", "kind")
        self.errors = counter("errors", "Errors, by kind", "kind")
        self.audits = counter("audits", "Full digests of the live weights, by result", "result")
        self.pause_seconds = Histogram(
            _PREFIX + "pause_seconds", "How long nothing was served", buckets=_SECONDS, registry=registry
        )
        self._phases = Histogram(
            _PREFIX + "phase_seconds", "Time of each phase", ["phase"], buckets=_SECONDS, registry=registry
        )
        for phase in PHASES:
            self._phases.labels(phase)
        registry.register(_StoreCollector(store))

    def phase(self, name: str, seconds: float) -> None:
        self._phases.labels(name).observe(seconds)

    def text(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self.registry)


class _StoreCollector(Collector):
    """Turns the store's own counters into metrics when asked."""

    def __init__(self, store: StoreMetrics) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        calls, seconds, read, written, errors, retries = families = [
            CounterMetricFamily(f"deltasync_store_{name}", text, labels=labels)
            for name, text, labels in (
                ("calls", "Store operations completed", ["operation"]),
                ("seconds", "Time in store operations, waiting and retries included", ["operation"]),
                ("read_bytes", "Object bytes read", ["operation"]),
                ("written_bytes", "Object bytes written", ["operation"]),
                ("errors", "Store operations that failed, by kind", ["operation", "kind"]),
                ("retries", "Store operations repeated, by kind", ["operation", "kind"]),
            )
        ]
        for operation, stats in self._store.snapshot().items():
            calls.add_metric([operation], stats.calls)
            seconds.add_metric([operation], stats.seconds)
            read.add_metric([operation], stats.bytes_read)
            written.add_metric([operation], stats.bytes_written)
            for kind, count in stats.errors.items():
                errors.add_metric([operation, kind], count)
            for kind, count in stats.retries.items():
                retries.add_metric([operation, kind], count)
        yield from families
