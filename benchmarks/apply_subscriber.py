"""The subscriber process of `benchmarks.apply`, which notes when each step of an apply began and ended.

Times are of time.monotonic, which all processes of a machine share on Linux.
"""

import asyncio
import logging
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from chunkstore.config import load_config
from deltasync.demo.child import Handler, Reply, claim_stdout, work
from subscriber.config import SGLangEngineConfig, SubscriberConfig
from subscriber.daemon import AppliedVersion, Subscriber
from subscriber.engine import Prepared, Scattered
from subscriber.sglang.client import Ack, Client
from subscriber.sglang.engine import SGLangEngine
from subscriber.staging import StagedUpdate

Span = tuple[float, float]

_REQUEST: Final = re.compile(r"^request .*to=(\S+) seconds=(\S+)$")


class _Requests(logging.Handler):
    """What the engine's client logs of its requests: (name, when it began, when it ended)."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[str, float, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = _REQUEST.match(record.getMessage())
        if found:
            now = time.monotonic()
            self.spans.append((found[1], now - float(found[2]), now))


class _Timed(SGLangEngine):
    """`prepared`, `scattered`: when the last ones were at work. `cpu_seconds`: what writing took the slowest rank."""

    prepared: Span
    scattered: Span
    cpu_seconds: float

    async def prepare(self, staged: StagedUpdate) -> Prepared:
        began = time.monotonic()
        result = await super().prepare(staged)
        self.prepared = began, time.monotonic()
        return result

    async def scatter(self, prepared: Prepared) -> Scattered:
        began = time.monotonic()
        result = await super().scatter(prepared)
        self.scattered = began, time.monotonic()
        return result

    async def _write(self, name: str, repair: bool) -> tuple[list[Ack], bool]:
        acks, clean = await super()._write(name, repair)
        self.cpu_seconds = max(float(ack["cpu_seconds"]) for ack in acks)
        return acks, clean


class Worker:
    """Follows the config's stream, from version to version when told, with its one server."""

    def __init__(self, config: SubscriberConfig) -> None:
        assert isinstance(config.engine, SGLangEngineConfig)
        self._config, self._engine_config = config, config.engine
        self._requests = _Requests()
        log = logging.getLogger("deltasync.subscriber")
        log.setLevel(logging.DEBUG)
        log.addHandler(self._requests)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"follow": self.follow, "floor": self.floor}

    def follow(self, version: int) -> Reply:
        """Recognise what the server holds, and bring it to `version`, the next one."""
        applied: list[AppliedVersion] = []
        server = self._engine_config.servers[0]
        engine = _Timed(self._engine_config, server, self._config.staging_path / "engine")
        self._requests.spans.clear()
        asyncio.run(Subscriber(self._config, engine, applied.append).run(until_version=version))
        if version == 0:
            return {}
        (last,) = applied
        before = [span for _, *span in self._requests.spans if span[0] < engine.prepared[0]]
        return {
            "changed": last.changed,
            "bytes_read": sum(manifest.nbytes + len(manifest.data) for manifest in last.manifests),
            "seconds": last.seconds | _parts(self._requests.spans, engine.prepared, engine.scattered),
            "scatter_cpu_seconds": engine.cpu_seconds,
            "recognise": (min(begin for begin, _ in before), max(end for _, end in before)),
            "prepare": engine.prepared,
            "pause": engine.scattered,
        }

    def floor(self, version: int) -> Reply:
        """Pause and continue with as many requests as an apply of `version` makes, which do nothing."""
        self._requests.spans.clear()
        span = asyncio.run(self._floor(version))
        return {"span": span, "seconds": _paused(self._requests.spans, span)}

    async def _floor(self, version: int) -> Span:
        client = Client(self._engine_config, self._engine_config.servers[0])
        await client.hello()
        began = time.monotonic()
        await client.pause()
        await client.ask("hello")  # asks all ranks, as a scatter does
        await client.show_version(version)
        await client.try_ask("poll", task="none")  # asks all ranks, as a release does
        await client.resume()
        ended = time.monotonic()
        await client.close()
        return began, ended

    def close(self) -> None:
        """Nothing outlives a call."""


def _parts(requests: list[tuple[str, float, float]], prepare: Span, pause: Span) -> dict[str, float]:
    """Seconds of the parts of a prepare, which follow each other, and of each request of a pause."""

    def only(name: str) -> Span:
        (span,) = [(begin, end) for to, begin, end in requests if to == name and begin >= prepare[0]]
        return span

    gather, load = only("gather"), only("load")
    gathered = max(end for to, _, end in requests if to == "poll" and end < load[0])
    return {
        "list_targets": gather[0] - prepare[0],
        "gather": gathered - gather[0],
        "resolve": load[0] - gathered,
        "load": prepare[1] - load[0],
        **{f"pause {to}": seconds for to, seconds in _paused(requests, pause).items()},
    }


def _paused(requests: list[tuple[str, float, float]], pause: Span) -> dict[str, float]:
    """Seconds of each request of a pause."""
    return {to: end - begin for to, begin, end in requests if pause[0] <= begin and end <= pause[1]}


def main() -> None:
    """argv[1]: subscriber.yaml."""
    replies = claim_stdout()
    work(lambda: Worker(load_config(Path(sys.argv[1]), SubscriberConfig)), replies)


if __name__ == "__main__":
    main()
