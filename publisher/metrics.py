"""The publisher process's Prometheus metrics, in a registry of their own. Units are in the names."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from chunkstore.metrics import StoreMetrics
from chunkstore.prometheus import SECONDS, StoreCollector
from publisher.commit import Commit

_PREFIX: Final = "deltasync_publisher_"

PHASES: Final = ("capture", "seal", "encode", "upload", "commit")
"""Of one version; the trainer waits for capture and seal, encode and upload are summed over threads."""


class Metrics:
    def __init__(self, store: StoreMetrics) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(_PREFIX + name, text, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        self.trainer_connected = gauge(
            "trainer_connected", "1 while a trainer's versions are being published"
        )
        self.committed_version = gauge("committed_version", "Newest version known to be committed; -1: none")
        self.committed_version.set(-1)
        self._fraction = gauge("changed_fraction", "Stored elements of the newest version, of all elements")
        self._bits = gauge("bits_per_changed_element", "Chunk bits per stored element of the newest version")
        self.trainers = counter("trainers", "Trainers whose stream was opened")
        self.anchors = counter(
            "anchors", "Versions stored whole by the publisher process, beside the trainer"
        )
        self.errors = counter("errors", "Errors, by kind", "kind")
        self._versions = counter("versions", "Versions committed")
        self._steps = counter("optimizer_steps", "Optimizer steps that committed versions cover")
        self._changed = counter("changed_elements", "Elements stored in committed versions")
        self._ambiguous = counter("ambiguous_elements", "Changed elements whose old value was not certain")
        self._unproved = counter("unproved_blocks", "Blocks sent whole because no reconstruction matched")
        self._chunks = counter("uploaded_chunks", "Chunks of committed versions")
        self._uploaded = counter("uploaded_bytes", "Chunk bytes of committed versions")
        self._encoded = counter(
            "encoded_bytes", "Section bytes of committed versions, by encoding", "encoding"
        )
        self._phases = Histogram(
            _PREFIX + "phase_seconds", "Time of each phase", ["phase"], buckets=SECONDS, registry=registry
        )
        for phase in PHASES:
            self._phases.labels(phase)
        registry.register(StoreCollector(store))

    def committed(self, commit: Commit) -> None:
        """Count one version."""
        manifest, stats = commit.manifest, commit.manifest.stats
        self.committed_version.set(commit.version)
        self._versions.inc()
        self._steps.inc(manifest.optimizer_steps)
        self._changed.inc(stats.changed)
        self._ambiguous.inc(stats.ambiguous)
        self._unproved.inc(stats.unproved_blocks)
        self._chunks.inc(len(manifest.chunks))
        self._uploaded.inc(manifest.nbytes)
        for encoding, nbytes in stats.bytes_by_encoding.items():
            self._encoded.labels(encoding).inc(nbytes)
        for phase, seconds in commit.seconds.items():
            self._phases.labels(phase).observe(seconds)
        if stats.changed:
            self._fraction.set(stats.changed / stats.elements)
            self._bits.set(8 * manifest.nbytes / stats.changed)

    def text(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self.registry)
