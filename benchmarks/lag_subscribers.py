"""One of the subscriber processes of `benchmarks.lag`: several subscribers, each on a thread of its own."""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lag import make_model
from deltasync.demo.child import Handler, Reply, claim_stdout, work
from subscriber.config import SubscriberConfig
from subscriber.daemon import AppliedVersion, Subscriber
from subscriber.poll import Watch
from subscriber.torch_engine import TorchEngine

_WAIT: Final = 240.0
_IDLE_POLLS: Final = 35  # looks from the start, until the poll interval has grown to its longest
_COUNTED: Final = {
    "deltasync_store_calls": "{}",
    "deltasync_store_read_bytes": "read bytes",
    "deltasync_store_written_bytes": "written bytes",
}


class Worker:
    """`settings`: `subscriber`, the configuration of all, `ids`, and `watch`: whether local files may wake them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if not settings["watch"]:
            Watch.start = lambda self: None  # type: ignore[method-assign]
        self._applied: list[AppliedVersion] = []
        self._subscribers = []
        for name in settings["ids"]:
            config = SubscriberConfig(**settings["subscriber"], id=name)
            engine = TorchEngine(make_model().to(torch.bfloat16))
            self._subscribers.append(Subscriber(config, engine, self._applied.append))
        for subscriber in self._subscribers:
            subscriber.start()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "wait_for": self.wait_for,
            "wait_until_idle": self.wait_until_idle,
            "counts": self.counts,
            "applied": self.applied,
        }

    def wait_for(self, version: int) -> Reply:
        for subscriber in self._subscribers:
            subscriber.wait_for(version, _WAIT)
        return {}

    def wait_until_idle(self) -> Reply:
        while any(self._polls(subscriber) < _IDLE_POLLS for subscriber in self._subscribers):
            time.sleep(0.5)
        return {}

    def counts(self) -> Reply:
        """Requests by kind, and bytes, of all subscribers together since the start."""
        total: Counter[str] = Counter()
        for subscriber in self._subscribers:
            text = subscriber.report.metrics.text().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if family.name in _COUNTED and sample.name.endswith("_total"):
                        total[_COUNTED[family.name].format(sample.labels["operation"])] += int(sample.value)
        return {"counts": total}

    def applied(self) -> Reply:
        """Every version of every apply: seconds since its manifest was made, and the phases of the apply."""
        return {
            "applied": [
                {
                    "version": manifest.version,
                    "target": manifest.version == applied.version,
                    "lag": applied.at - manifest.created_at,
                    "seconds": applied.seconds,
                }
                for applied in self._applied
                for manifest in applied.manifests
            ]
        }

    def close(self) -> None:
        for subscriber in self._subscribers:
            subscriber.stop()

    def _polls(self, subscriber: Subscriber) -> float:
        return float(subscriber.report.metrics.polls._value.get())


def main() -> None:
    """argv[1]: the settings as JSON."""
    replies = claim_stdout()
    logging.getLogger().setLevel(logging.WARNING)
    torch.set_num_threads(1)
    work(lambda: Worker(json.loads(sys.argv[1])), replies)


if __name__ == "__main__":
    main()
