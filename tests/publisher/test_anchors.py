"""Routine anchors: when one is due, and the thread that builds them beside a real publisher process."""

from pathlib import Path

import pytest

from chunkstore.errors import StoreUnavailable
from chunkstore.memory import MemoryStore
from chunkstore.metrics import StoreMetrics
from manifest.verify import verify_stream
from publisher.anchors import Chain, ChainGauge, RoutineAnchors
from publisher.config import AnchorConfig
from publisher.refusals import Refusals
from publisher.report import Report
from tests.subscriber.parts import until
from tests.support.faults import FaultStore
from tests.support.streams import StreamBuilder, random_weights, refuse

SHAPES = {"a": (400, 50), "b": (7,)}


def builder() -> StreamBuilder:
    return StreamBuilder(MemoryStore(), random_weights(SHAPES))


@pytest.mark.parametrize(
    ("chain", "config", "due"),
    [
        (Chain(3, 100, 100), {"every": 3, "chain_weight": None}, True),
        (Chain(2, 100, 100), {"every": 3, "chain_weight": None}, False),
        (Chain(2, 101, 100), {"chain_weight": 1.0}, True),
        (Chain(2, 100, 100), {"chain_weight": 1.0}, False),
        (Chain(2, 51, 100), {"chain_weight": 0.5}, True),
        (Chain(0, 0, 100), {"every": 1}, False),
        (Chain(9, 900, None), {"every": 1}, False),
        (Chain(9, 900, 100), {"chain_weight": None}, False),
    ],
)
def test_when_an_anchor_is_due(chain: Chain, config: dict[str, object], due: bool) -> None:
    assert chain.due(AnchorConfig.model_validate(config)) is due


def test_the_chain_is_measured_from_the_newest_anchor_of_either_kind() -> None:
    stream = builder()
    stream.train(0.1, steps=4)
    gauge = ChainGauge(stream.log)
    sizes = [m.nbytes for m in stream.manifests]
    assert gauge.measure(stream.manifests[4]) == Chain(4, sum(sizes[1:]), sizes[0])
    alternate = stream.alternate(3)
    assert gauge.measure(stream.manifests[4]) == Chain(1, sizes[4], alternate.nbytes)
    anchor = stream.anchor()
    assert gauge.measure(anchor) == Chain(0, 0, anchor.nbytes)
    newest = stream.train(0.1)
    assert gauge.measure(newest) == Chain(1, newest.nbytes, anchor.nbytes)


def test_a_manifest_is_read_once() -> None:
    stream = builder()
    stream.train(0.1, steps=3)
    read: list[str] = []
    store = FaultStore(
        stream.store, before=lambda operation, key: read.append(key) if operation == "get" else None
    )
    stream.log.store = store
    gauge = ChainGauge(stream.log)
    for _ in range(3):
        gauge.measure(stream.manifests[3])
    assert len(read) == 3, "the newest is given"


def test_the_thread_stores_versions_whole_and_survives_a_store_that_fails() -> None:
    stream = builder()
    failing = True

    def fail(operation: str, key: str) -> Exception | None:
        return StoreUnavailable("503") if failing and operation == "put" else None

    report = Report(StoreMetrics())
    store = FaultStore(stream.store, before=fail)
    stream.train(0.1)
    with RoutineAnchors(store, AnchorConfig(every=1), None, report, look=0.01):
        until(lambda: (error := report.status().last_error) is not None and error.kind == "store_unavailable")
        assert stream.log.alternates() == []
        failing = False
        until(lambda: stream.log.alternates() == [1])
        stream.train(0.1)
        until(lambda: stream.log.alternates() == [1, 2])
        until(lambda: b"deltasync_publisher_anchors_total 2.0" in report.metrics.text())
    assert verify_stream(stream.store).ok


def test_the_thread_answers_what_subscribers_refuse() -> None:
    """As of a stream that several writers feed, whatever the policy says."""
    stream = builder()
    stream.train(0.1)
    refuse(stream.store, 1)
    refusals = Refusals(stream.store, look=0.0)
    never = AnchorConfig(every=None, chain_weight=None)
    with RoutineAnchors(stream.store, never, None, Report(StoreMetrics()), look=0.01, refusals=refusals):
        until(lambda: stream.log.alternates() == [1])
        stream.train(0.1)
        refuse(stream.store, 1, "another")  # what is whole by now helps it already
        refuse(stream.store, 2, "third")
        until(lambda: stream.log.alternates() == [1, 2])
    assert verify_stream(stream.store).ok


def test_it_waits_for_a_stream_and_stops_at_once(tmp_path: Path) -> None:
    with RoutineAnchors(MemoryStore(), AnchorConfig(), None, Report(StoreMetrics()), look=0.001):
        pass
