"""The subscriber's Prometheus metrics, in a registry of their own. Units are in the names."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from chunkstore.metrics import StoreMetrics
from chunkstore.prometheus import SECONDS, StoreCollector

_PREFIX: Final = "deltasync_subscriber_"

PHASES: Final = ("detect", "fetch", "stage", "prepare", "scatter", "pause", "audit")
"""detect: from the commit to being seen; pause: how long nothing was served."""


class Metrics:
    """`store`: included unless None. `lag`: versions and seconds behind, asked whenever the metrics are read."""

    def __init__(self, store: StoreMetrics | None, lag: Callable[[], tuple[int, float]]) -> None:
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
            _PREFIX + "pause_seconds", "How long nothing was served", buckets=SECONDS, registry=registry
        )
        self._phases = Histogram(
            _PREFIX + "phase_seconds", "Time of each phase", ["phase"], buckets=SECONDS, registry=registry
        )
        for phase in PHASES:
            self._phases.labels(phase)
        if store is not None:
            registry.register(StoreCollector(store))

    def phase(self, name: str, seconds: float) -> None:
        self._phases.labels(name).observe(seconds)

    def text(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self.registry)


class ByServer(Collector):
    """The metrics of several engines, each sample with the label `server` in front of its own."""

    def __init__(self, metrics: Mapping[str, Metrics]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for server, metrics in self._metrics.items():
            for family in metrics.registry.collect():
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={"server": server} | sample.labels) for sample in family.samples
                ]
        yield from families.values()


def text_by_server(metrics: Mapping[str, Metrics], store: StoreMetrics) -> bytes:
    """All of `metrics`, by server, and the store's once, in the Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(ByServer(metrics))
    registry.register(StoreCollector(store))
    return generate_latest(registry)
