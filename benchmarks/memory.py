"""Peak extra memory of publisher and subscriber: what they take beyond the weights that are there anyway.

Models with random weights in the shapes of real ones, synthetic gradients, AdamW; each side in a fresh process.
Peaks are the kernel's (VmHWM, reset before each phase), and for the publisher process, which maps the trainer's memory,
private memory (RssAnon) seen every 2 ms. The model of a million parameters shows what libraries and threads take.

    python -m benchmarks.memory --json memory.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from chunkstore.open import StoreConfig
from deltasync.commands._daemon import return_freed_memory
from manifest.keys import manifest_key
from publisher.publisher import Publisher
from subscriber.config import SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.torch_engine import TorchEngine

_MIB: Final = 1 << 20
_WAIT: Final = 600.0
_TUNED: Final = {"MALLOC_MMAP_THRESHOLD_": str(_MIB)}
"""glibc returns freed blocks from this size to the system at once, and so keeps no holes."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A decoder with tied embeddings and gated MLPs."""

    vocabulary: int
    hidden: int
    layers: int
    queries: int
    keys: int
    inner: int

    def tensors(self) -> Iterator[tuple[int, ...]]:
        yield (self.vocabulary, self.hidden)
        for _ in range(self.layers):
            yield from ((self.queries, self.hidden), (self.hidden, self.queries))
            yield from ((self.keys, self.hidden),) * 2
            yield from ((self.inner, self.hidden),) * 2
            yield (self.hidden, self.inner)
            yield from ((self.hidden,),) * 2
        yield (self.hidden,)

    def model(self, dtype: torch.dtype) -> nn.ParameterList:
        """Weights at 0.02, as after training."""
        return nn.ParameterList(torch.empty(s, dtype=dtype).normal_(0, 0.02) for s in self.tensors())


SHAPES: Final = {
    "1M": Shape(1024, 128, 5, 128, 128, 384),
    "SmolLM2-135M": Shape(49152, 576, 30, 576, 192, 1536),
    "Qwen3-0.6B": Shape(151936, 1024, 28, 2048, 1024, 3072),
}


class Watch:
    """Peak memory of a process, in bytes, since it was begun."""

    def __init__(self, pid: int | str = "self") -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._clear = Path(f"/proc/{pid}/clear_refs")
        self._stop = threading.Event()

    def begin(self) -> None:
        self._clear.write_text("5")  # sets VmHWM to what is resident now
        self._start = self._read()
        self._anonymous = self._start["RssAnon"]
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def end(self) -> dict[str, int]:
        """`extra`: kernel's peak beyond the beginning; `private`: the same of private memory, sampled."""
        self._stop.set()
        self._thread.join()
        end = self._read()
        self._stop.clear()
        return {
            "extra": end["VmHWM"] - self._start["VmRSS"],
            "private": self._anonymous - self._start["RssAnon"],
        }

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self._anonymous = max(self._anonymous, self._read()["RssAnon"])

    def _read(self) -> dict[str, int]:
        lines = (line.split() for line in self._status.read_text().splitlines())
        return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def train_and_publish(config: Facts, shape: Shape, versions: int, watched: int | None) -> list[Facts]:
    """A trainer with its publisher, which is process `watched` or in this one."""
    torch.manual_seed(0)
    model = shape.model(torch.float32)
    # Fused: the other implementations make temporaries of the largest tensor's size.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-7, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)

    def step() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.normal_()
        optimizer.step()

    step()
    watches = {"trainer": Watch(), "publisher": Watch(watched)} if watched else {"publisher": Watch()}

    def begin() -> None:
        for watch in watches.values():
            watch.begin()

    def end(phase: str) -> Facts:
        return {"phase": phase, **{process: watch.end() for process, watch in watches.items()}}

    begin()
    facts: list[Facts] = []
    with Publisher.attach(optimizer, model, config) as publisher:
        facts.append(end("anchor"))
        begin()
        manifests = []
        for version in range(versions):
            step()
            commit = publisher.publish(version).result(_WAIT)
            assert commit is not None
            manifests.append(commit.manifest)
        facts.append(end("delta"))
    facts[-1] |= {
        "elements": manifests[0].stats.elements,
        "changed": max(m.stats.changed for m in manifests),
        "chunk_bytes": max(m.nbytes for m in manifests),
        "seconds": manifests[-1].stats.seconds,
    }
    return facts


def follow(store: Path, later: Path, state: Path, shape: Shape, versions: int) -> list[Facts]:
    """A rollout worker that loads the anchor, then each version, whose manifests come from `later`."""
    return_freed_memory()  # as `deltasync subscriber run` does
    engine, watch = TorchEngine(shape.model(torch.bfloat16)), Watch()
    settings = SubscriberConfig(
        store=StoreConfig(url=str(store)), state_dir=state, http=None, poll_interval=0.1
    )
    subscriber = Subscriber(settings, engine)
    watch.begin()
    subscriber.start()
    subscriber.wait_for(0, _WAIT)
    facts: list[Facts] = [{"phase": "anchor", "subscriber": watch.end()}]
    watch.begin()
    for version in range(1, versions + 1):
        key = manifest_key(version)
        (later / Path(key).name).rename(store / key)
        subscriber.wait_for(version, _WAIT)
    facts.append({"phase": "delta", "subscriber": watch.end()})
    subscriber.stop()
    return facts


def fresh(call: Callable[[], list[Facts]], environment: Mapping[str, str] | None = None) -> list[Facts]:
    """The result of `call`, from a process of its own with more `environment`."""
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(call).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def publisher_process(config: Facts, folder: Path) -> Iterator[int]:
    """`deltasync publisher run`, its process id."""
    path = folder / "publisher.yaml"
    path.write_text(json.dumps(config))  # YAML as well
    command = [sys.executable, "-m", "deltasync.cli", "publisher", "run", "-c", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = process.stderr
        assert any("waiting for a trainer" in line for line in log)
        drain = threading.Thread(target=log.read, daemon=True)
        drain.start()
        try:
            yield process.pid
        finally:
            process.terminate()
            drain.join()


def measure(shape: Shape, versions: int, work: Path, spool: Path) -> Iterator[Facts]:
    """One model: a publisher inside the trainer, also with malloc tuned, one beside it, and a subscriber."""
    inside = {"store": {"url": str(work / "inside")}, "inference_dtype": "bfloat16"}
    for facts in fresh(partial(train_and_publish, inside, shape, versions, None)):
        yield {"side": "in-process", **facts}
    tuned = {**inside, "store": {"url": str(work / "tuned")}}
    for facts in fresh(partial(train_and_publish, tuned, shape, versions, None), _TUNED):
        yield {"side": "tuned", **facts}
    beside = {**inside, "store": {"url": str(work / "beside")}, "spool": str(spool), "http": None}
    with publisher_process(beside, work) as pid:
        for facts in fresh(partial(train_and_publish, beside, shape, versions, pid)):
            del facts["publisher"]["extra"]  # it would count the trainer's memory
            yield {"side": "sidecar", **facts}
    later = work / "later"
    later.mkdir()
    for version in range(1, versions + 1):
        key = manifest_key(version)
        (work / "inside" / key).rename(later / Path(key).name)
    for facts in fresh(partial(follow, work / "inside", later, work / "state", shape, versions)):
        yield {"side": "subscriber", **facts}


def line(name: str, facts: Facts) -> str:
    """The figures for people."""
    cells = [f"{name:13} {facts['side']:11} {facts['phase']:7}"]
    for process in ("publisher", "trainer", "subscriber"):
        for key, value in facts.get(process, {}).items():
            cells.append(f"{process} {key} {value / _MIB:,.0f} MiB")
    if "changed" in facts:
        cells.append(f"changed {100 * facts['changed'] / facts['elements']:.2f} % of {facts['elements']:,}")
    return "; ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--spool", type=Path, default=Path("/dev/shm"), help="where shared memory is made")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    results: Facts = {"versions": args.versions, "threads": torch.get_num_threads(), "models": {}}
    for name in args.models:
        rows = results["models"][name] = []
        with (
            tempfile.TemporaryDirectory() as work,
            tempfile.TemporaryDirectory(dir=args.spool, prefix="deltasync-memory-") as spool,
        ):
            for facts in measure(SHAPES[name], args.versions, Path(work), Path(spool)):
                rows.append(facts)
                print(line(name, facts), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
