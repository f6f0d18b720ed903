"""What the metrics of both daemons have in common."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from chunkstore.metrics import StoreMetrics

SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Bounds of the buckets of every histogram of times."""


class StoreCollector(Collector):
    """Turns a store's own counters into metrics when asked."""

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
