"""Parsing a large manifest, and reading the manifests of a long catch-up, each against how it was done before.

*One by one*: every section as an object of its own that pydantic makes and checks, and a dump of these objects to see
that the form is canonical. *One after the other*: a manifest is asked for when the one above it has come; *twice*: once
to find out what the engine holds and once to plan, as a cold start did.

    python -m benchmarks.manifests [--sections 360000] [--versions 100] [--latency 0.02] [--json FILE]
"""

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from chunkstore.codec import WINDOW
from chunkstore.memory import MemoryStore
from manifest.history import History
from manifest.keys import chunk_key
from manifest.log import VersionLog, create_or_open_stream
from manifest.schema import ChunkRef, Manifest
from manifest.sections import SectionRef
from tests.support.manifests import fixed_bytes, make_chain, make_manifest

_PER_CHUNK = 1000


class OneByOneChunk(ChunkRef):
    sections: list[SectionRef]  # type: ignore[assignment]


class OneByOne(Manifest):
    chunks: list[OneByOneChunk]  # type: ignore[assignment]

    @property
    def data(self) -> bytes:
        packed: bytes = msgpack.packb(self.model_dump())
        return packed


class SlowStore(MemoryStore):
    """Every whole read takes `latency` seconds more."""

    latency = 0.0

    def get(self, key: str, *, limit: int) -> bytes:
        time.sleep(self.latency)
        return super().get(key, limit=limit)


def large_manifest(sections: int) -> Manifest:
    """A delta of a model with that many windows, four to a tensor: 4 Mi elements each."""
    base = make_manifest(0)
    attempt = fixed_bytes("attempt", 1, length=16)
    chunks = [
        {
            "key": chunk_key(1, attempt, 0, number),
            "nbytes": 50 << 20,
            "hash": fixed_bytes("chunk", number),
            "sections": [
                {
                    "tensor": i // 4,
                    "start": i % 4 * WINDOW,
                    "stop": (i % 4 + 1) * WINDOW,
                    "whole": False,
                    "changed": 41943,
                }
                for i in range(first, min(first + _PER_CHUNK, sections))
            ],
        }
        for number, first in enumerate(range(0, sections, _PER_CHUNK))
    ]
    digests = bytes(8 * (sections // 4))
    return make_manifest(1, base, base=base, attempt=attempt, chunks=chunks, digests=digests)


def parse(data: bytes) -> dict[str, Any]:
    models: dict[str, type[Manifest]] = {"one by one": OneByOne, "now": Manifest}
    rows = {}
    for name, model in models.items():
        seconds = []
        for _ in range(3):
            began = time.process_time()
            model.from_bytes(data, name="manifest")
            seconds.append(time.process_time() - began)
        tracemalloc.start()
        kept = model.from_bytes(data, name="manifest")
        rows[name] = {"seconds": min(seconds), "bytes_kept": tracemalloc.get_traced_memory()[0]}
        tracemalloc.stop()
        del kept
    before, now = rows["one by one"], rows["now"]
    ratios = {key: before[key] / now[key] for key in now}
    return {"manifest_bytes": len(data), **rows, "ratios": ratios}


def read_back(versions: int, latency: float) -> dict[str, float]:
    """Seconds to read what a cold start reads."""
    store = SlowStore()
    stream = create_or_open_stream(store)
    chain = make_chain(versions + 1)
    log = VersionLog(store, stream)
    parent: Manifest | None = None
    for manifest in chain:
        changes = {"stream": stream.id, "parent_hash": None if parent is None else parent.hash}
        parent = manifest.model_copy(update=changes)
        log.commit(parent)
    store.latency = latency

    def one_after_the_other() -> None:
        for version in range(versions, -1, -1):
            log.read(version)

    def now() -> None:
        history = History(log)
        history.plan(None, versions, references=True)
        history.plan(None, versions)

    once, both = timed(one_after_the_other), timed(now)
    return {"one after the other, twice": 2 * once, "now": both, "ratio": 2 * once / both}


def timed(work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", type=int, default=360_000)
    parser.add_argument("--versions", type=int, default=100)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds of every read")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    results = {
        "parse": parse(large_manifest(args.sections).data),
        "read_back": read_back(args.versions, args.latency),
    }
    print(json.dumps(results, indent=1))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
