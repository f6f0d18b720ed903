"""One publisher, many subscribers, one store: lag from commit to applied, and what the polling asks of the store.

A real trainer publishes a small model, so that the machine spends its time on the protocol and not on weights. Every
subscriber is a whole `Subscriber`, with journal, spool, status object and torch engine, on a thread of its own; they
share a few processes. First nothing is published, then a version every few seconds. Exits 1 unless all of them get to
all versions. `--store s3` is moto in a process of its own, one request at a time, unless --store-url names another.

    python -m benchmarks.lag --store s3 [--subscribers 50] [--json FILE]
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from deltasync.demo.child import Child
from deltasync.demo.store import open_demo_store
from publisher.publisher import Publisher

_TIMEOUT: Final = 300.0
_WIDTH: Final = 256
_LAYERS: Final = 4
_PRICES: Final = {"head": 0.4e-6, "get": 0.4e-6, "get_range": 0.4e-6, "put": 5e-6, "list": 5e-6}
"""USD per request, S3 standard, us-east-1, as listed by AWS (https://aws.amazon.com/s3/pricing/) in 2025."""

_PATIENCE: Final = 4  # times the poll interval: how rarely an idle subscriber looks
_PER_VERSION: Final = 3  # requests that nobody could do without: manifest, chunk, status object

Counts = Counter[str]


def make_model() -> nn.Module:
    """What is trained, and what every subscriber serves."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


class Trainer:
    def __init__(self, store: dict[str, Any]) -> None:
        self._model = make_model()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6)
        config = {"store": store, "inference_dtype": "bfloat16"}
        self.publisher = Publisher.attach(self._optimizer, self._model, config)

    def publish(self) -> int:
        for parameter in self._model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self._optimizer.step()
        commit = self.publisher.publish().result(_TIMEOUT)
        assert commit is not None, "random gradients change something"
        return commit.version


class Fleet:
    """All subscriber processes together."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children

    def wait_for(self, version: int) -> None:
        for child in self._children:
            child.call("wait_for", version=version, timeout=_TIMEOUT)

    def wait_until_idle(self) -> None:
        """Until every poll interval has grown to its longest."""
        for child in self._children:
            child.call("wait_until_idle", timeout=_TIMEOUT)

    def counts(self) -> Counts:
        """Requests by kind, and bytes read and written, of all since their start."""
        total: Counts = Counter()
        for child in self._children:
            total.update(child.call("counts", timeout=_TIMEOUT)["counts"])
        return total

    def applied(self) -> list[dict[str, Any]]:
        """Of every subscriber and version: lag, and whether it was the newest of its apply."""
        return [row for child in self._children for row in child.call("applied", timeout=_TIMEOUT)["applied"]]


def measure(args: argparse.Namespace, fleet: Fleet, trainer: Trainer) -> dict[str, Any]:
    fleet.wait_for(0)
    fleet.wait_until_idle()
    began, before = time.monotonic(), fleet.counts()
    time.sleep(args.idle)
    idle_seconds, idle = time.monotonic() - began, fleet.counts() - before
    last = trainer.publish()
    fleet.wait_for(last)  # ends the patience that the idle time has taught them
    began, before = time.monotonic(), fleet.counts()
    for number in range(args.versions):
        # At no particular moment of anybody's poll interval.
        time.sleep(max(0.0, began + (number + random.random()) * args.every - time.monotonic()))
        newest = trainer.publish()
    fleet.wait_for(newest)
    seconds, busy = time.monotonic() - began, fleet.counts() - before
    rows = [row for row in fleet.applied() if row["version"] > last]
    return {
        "subscribers": args.subscribers,
        "processes": args.processes,
        "poll_interval": args.poll_interval,
        "versions": args.versions,
        "every": args.every,
        "applied": len(rows),
        "applies": sum(row["target"] for row in rows),
        "lag": distribution([row["lag"] for row in rows]),
        "phases": phases(rows),
        "idle": rates(idle, idle_seconds, args.subscribers),
        "busy": rates(busy, seconds, args.subscribers),
        "idle_of_minimum": requests(idle)
        / (idle_seconds * args.subscribers / (_PATIENCE * args.poll_interval)),
        "busy_of_minimum": requests(busy)
        / (args.subscribers * (seconds / args.poll_interval + _PER_VERSION * args.versions)),
        "per_version": {kind: n / args.subscribers / args.versions for kind, n in busy.items()},
        "usd_per_idle_day": cost(idle) / idle_seconds * 86400 / args.subscribers,
    }


def distribution(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)

    def quantile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"median": quantile(0.5), "p95": quantile(0.95), "p99": quantile(0.99), "max": ordered[-1]}


def phases(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median seconds per phase of an apply."""
    seconds = [row["seconds"] for row in rows if row["target"]]
    return {name: statistics.median(one.get(name, 0.0) for one in seconds) for name in seconds[0]}


def rates(counts: Counts, seconds: float, subscribers: int) -> dict[str, dict[str, float]]:
    return {
        kind: {"per_second": n / seconds, "per_subscriber": n / seconds / subscribers}
        for kind, n in counts.items()
    }


def requests(counts: Counts) -> int:
    return sum(counts[kind] for kind in _PRICES)


def cost(counts: Counts) -> float:
    """USD."""
    return sum(price * counts[kind] for kind, price in _PRICES.items())


def report(result: dict[str, Any]) -> None:
    lag, interval = result["lag"], result["poll_interval"]
    print(f"\n{result['subscribers']} subscribers in {result['processes']} processes, {result['store']}")
    print(f"{result['applied']} versions applied in {result['applies']} applies\n")
    print("lag, commit to applied      " + "".join(f"{name:>10}" for name in lag))
    print("  seconds                   " + "".join(f"{value:10.2f}" for value in lag.values()))
    print("  of the poll interval      " + "".join(f"{value / interval:10.2f}" for value in lag.values()))
    print("median phase, seconds         " + ", ".join(f"{k} {v:.3f}" for k, v in result["phases"].items()))
    print(
        "\nrequests                        idle: per second, per subscriber and s   busy: the same   per version"
    )
    for kind in (*_PRICES, "read bytes", "written bytes"):
        idle, busy = (
            result[name].get(kind, {"per_second": 0, "per_subscriber": 0}) for name in ("idle", "busy")
        )
        print(
            f"  {kind:28} {idle['per_second']:12.2f} {idle['per_subscriber']:12.4f}"
            f" {busy['per_second']:14.2f} {busy['per_subscriber']:12.4f} {result['per_version'].get(kind, 0):12.2f}"
        )
    print("\nrequests, of the least that these intervals allow: ", end="")
    print(f"idle {result['idle_of_minimum']:.2f}, busy {result['busy_of_minimum']:.2f}")
    print(f"an idle subscriber-day at list prices: {result['usd_per_idle_day']:.4f} USD")


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    (folder / "logs").mkdir()
    with ExitStack() as stack:
        store = stack.enter_context(open_demo_store(args.store, args.store_url, args.endpoint_url, folder))
        os.environ.update(store.environment)
        fields = store.config.model_dump(exclude_defaults=True)
        trainer = Trainer(fields)
        stack.callback(trainer.publisher.close)
        children = []
        for number in range(args.processes):
            config = {
                "store": fields,
                "poll_interval": args.poll_interval,
                "state_dir": str(folder / "state"),
                "http": None,
            }
            ids = [f"worker-{n:03}" for n in range(number, args.subscribers, args.processes)]
            settings = {"subscriber": config, "ids": ids, "watch": args.watch}
            command = (sys.executable, "-m", "benchmarks.lag_subscribers", json.dumps(settings))
            log = folder / "logs" / f"subscribers-{number}.log"
            children.append(stack.enter_context(Child(f"subscribers-{number}", command, log)))
        result = measure(args, Fleet(children), trainer)
    watched = "" if args.store == "s3" else ", watched" if args.watch else ", polled like a network mount"
    return {"store": args.store_url or args.store + watched, "cpus": os.cpu_count()} | result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", choices=("posix", "s3"), default="posix")
    parser.add_argument(
        "--store-url", help="instead of a folder or moto: where to publish, in a fresh prefix"
    )
    parser.add_argument("--endpoint-url", help="of an S3 server for --store-url")
    parser.add_argument(
        "--no-watch", dest="watch", action="store_false", help="posix: as if it was a network mount"
    )
    parser.add_argument("--subscribers", type=int, default=50)
    parser.add_argument("--processes", type=int, default=5, help="that share the subscribers")
    parser.add_argument("--poll-interval", type=float, default=1.0)
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--every", type=float, default=8.0, help="seconds between versions")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds without versions")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="where files are kept meanwhile")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.work, prefix="deltasync-lag-") as folder:
        result = run(args, Path(folder))
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if result["applied"] != args.subscribers * args.versions:
        sys.exit(1)


if __name__ == "__main__":
    main()
