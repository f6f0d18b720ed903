"""Sparse updates of a real SGLang server against SGLang's own load of the same versions, on the same server.

SmolLM2-135M takes real AdamW steps at learning rates that change some 0.2, 1 and 5 % of it. Per version: the subscriber
brings the server there while a request streams, or while small requests are sent; then SGLang loads the same version
from an exported checkpoint. Needs `make venv-sglang`, and about 6 GB of memory. Exits 1 unless after each of SGLang's
loads its checksums are those after the sparse update.

    python -m benchmarks.apply [--versions 4] [--json FILE]
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from deltasync.demo.child import Child
from deltasync.demo.model import prepare_model
from deltasync.demo.sglang_server import SglangOptions, SglangServer
from tests.sglang import oracle
from tests.sglang.training import Trainer

RATES: Final = (3e-7, 3.8e-6, 3e-5)
"""Learning rates that change about 0.2, 1 and 5 % of the bf16 values of SmolLM2-135M."""
STEPS: Final = 2
"""Optimizer steps per version."""

_WARM_UP: Final = 10  # steps at the highest rate, until moments and masters are spread like those of a run
_FLOORS: Final = 3  # empty pauses per version
_TIMEOUT: Final = 300.0
_TOKENS: Final = 1500
_FLAGS: Final = ("--context-length", "2048", "--max-total-tokens", "8192")

Span = tuple[float, float]


class Streaming:
    """One request that streams its tokens. `spans`: between each token and the next."""

    def __init__(self, server: SglangServer) -> None:
        self._server = server
        self._stream = oracle.Stream(server, _TOKENS)

    def wait_for(self, more: int) -> None:
        self._stream.wait_for(len(self._stream.ids) + more, _TIMEOUT)

    def stop(self) -> None:
        oracle.post(self._server, "/abort_request", abort_all=True)
        self._stream.result(_TIMEOUT)

    @property
    def spans(self) -> list[Span]:
        return list(zip(self._stream.times, self._stream.times[1:], strict=False))


class Requests:
    """Small requests, one after the other: 8 tokens in, 4 out. `spans`: of each."""

    def __init__(self, server: SglangServer) -> None:
        self._server = server
        self.spans: list[Span] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for(self, more: int) -> None:
        with self._changed:
            goal = len(self.spans) + more
            if not self._changed.wait_for(lambda: len(self.spans) >= goal, _TIMEOUT):
                raise TimeoutError(f"no {more} requests within {_TIMEOUT} s")

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        numbers = random.Random(0)
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        with self._server.client(_TIMEOUT) as client:
            while not self._stopped:
                ids = [numbers.randrange(1000, 40000) for _ in range(8)]
                began = time.monotonic()
                client.post(
                    "/generate", json={"input_ids": ids, "sampling_params": sampling}
                ).raise_for_status()
                with self._changed:
                    self.spans.append((began, time.monotonic()))
                    self._changed.notify_all()


def observe(child: Child, version: int, load: Streaming | Requests) -> dict[str, Any]:
    """Bring the server to `version` while `load` is on it, and sort what the load saw by what happened meanwhile."""
    load.wait_for(5)
    idle = time.monotonic()
    load.wait_for(60 if isinstance(load, Streaming) else 10)
    began = time.monotonic()
    reply = child.call("follow", version=version, timeout=_TIMEOUT)
    empty = []
    for _ in range(_FLOORS):
        load.wait_for(3)  # or the pause would wait for what the one before left to be computed anew
        empty.append(child.call("floor", version=version, timeout=_TIMEOUT))
    load.wait_for(3)
    load.stop()
    pauses = [reply["pause"]]
    apart = [reply["recognise"], *pauses]  # the first is what a new subscriber does, and none at work
    spans = [("idle", [(idle, began)]), ("prepare", [reply["prepare"]])]
    spans += [("pause", pauses), ("empty pause", [one["span"] for one in empty])]
    kind = "gap" if isinstance(load, Streaming) else "request"
    seen = {
        f"{kind} {name}": [
            end - begin
            for begin, end in load.spans
            if _overlaps((begin, end), windows) and (name != "prepare" or not _overlaps((begin, end), apart))
        ]
        for name, windows in spans
    }
    parts = {name: statistics.median(one["seconds"][name] for one in empty) for name in empty[0]["seconds"]}
    return reply | {"seen": seen, "floor": parts, "floor_seconds": sum(parts.values())}


def _overlaps(span: Span, windows: Sequence[Span]) -> bool:
    return any(span[0] < end and begin < span[1] for begin, end in windows)


def measure(server: SglangServer, child: Child, trainer: Trainer, number: int) -> dict[str, Any]:
    """One version: train, apply, then let SGLang load it. Raises AssertionError if that changes a weight."""
    version = trainer.publish(STEPS)
    row = observe(child, version, Requests(server) if number % 2 else Streaming(server))
    sums = oracle.checksums(server)
    folder = trainer.export(version)
    row["checkpoint_bytes"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    began, busy = time.monotonic(), cpu_seconds(server)
    oracle.load_from_disk(server, folder, version=str(version))
    row["load_seconds"] = time.monotonic() - began
    row["load_cpu_seconds"] = max(
        after - before for before, after in zip(busy, cpu_seconds(server), strict=True)
    )
    row["identical"] = oracle.checksums(server) == sums
    shutil.rmtree(folder)
    elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    return row | {"version": version, "share": row["changed"] / elements}


def cpu_seconds(server: SglangServer) -> list[float]:
    """What each rank's scheduler has taken so far, all its threads. Linux."""
    processes = [Path(f"/proc/{pid}") for pid in server.pids()]
    return [
        sum(int(path.read_text().split()[0]) for path in process.glob("task/*/schedstat")) / 1e9
        for process in processes
        if b"sglang::scheduler" in (process / "cmdline").read_bytes()
    ]


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """What is compared, per version."""
    seconds = row["seconds"]
    return {
        "changed": row["share"],
        "scatter_of_load": seconds["scatter"] / row["load_seconds"],
        "scatter_of_load_cpu": row["scatter_cpu_seconds"] / row["load_cpu_seconds"],
        "pause_of_load": seconds["pause"] / row["load_seconds"],
        "floor_of_pause": row["floor_seconds"] / seconds["pause"],
        "bytes_of_checkpoint": row["bytes_read"] / row["checkpoint_bytes"],
        "load_seconds": row["load_seconds"],
        "floor_seconds": row["floor_seconds"],
        "scatter cpu seconds": row["scatter_cpu_seconds"],
        "load cpu seconds": row["load_cpu_seconds"],
        **{f"{name} seconds": value for name, value in seconds.items()},
        **{f"empty pause {name} seconds": value for name, value in row["floor"].items()},
    }


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    each = [ratios(row) for row in rows]
    return {name: statistics.median(row[name] for row in each) for name in each[0]}


def seen(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of all that the loads saw in versions of one rate: count, median and maximum in seconds."""
    pooled: dict[str, list[float]] = {}
    for row in rows:
        for name, values in row["seen"].items():
            pooled.setdefault(name, []).extend(values)
    return {
        name: {"count": len(values), "median": statistics.median(values), "max": max(values)}
        for name, values in pooled.items()
        if values
    }


def report(results: dict[str, Any]) -> None:
    print(
        "\n  changed   scatter      load   ratio  CPU ratio  |  bytes read  ratio  |   pause  its floor  |  prepare"
    )
    for rate in results["rates"]:
        for row in [*map(ratios, rate["versions"]), rate["medians"]]:
            print(
                f"{100 * row['changed']:8.2f}% {1e3 * row['scatter seconds']:7.1f}ms"
                f" {1e3 * row['load_seconds']:7.0f}ms   1/{1 / row['scatter_of_load']:<5.1f}"
                f" 1/{1 / row['scatter_of_load_cpu']:<5.1f}   |"
                f" {1e-3 * row['bytes_of_checkpoint'] * results['checkpoint_bytes']:9.0f}kB"
                f"  1/{1 / row['bytes_of_checkpoint']:<5.0f}| {1e3 * row['pause seconds']:6.0f}ms"
                f" {1e3 * row['floor_seconds']:7.0f}ms   | {1e3 * row['prepare seconds']:6.0f}ms"
                + ("   median" if row is rate["medians"] else "")
            )
    for rate in results["rates"]:
        print(f"\nat {100 * rate['medians']['changed']:.2f} %, milliseconds")
        for name, value in rate["medians"].items():
            if name.endswith(" seconds"):
                print(f"  {name.removesuffix(' seconds'):32} {1e3 * value:9.1f}")
        for name, value in rate["seen"].items():
            print(
                f"  {name:32} {1e3 * value['median']:9.1f} at most {1e3 * value['max']:7.1f}  of {value['count']}"
            )


def run(args: argparse.Namespace, folder: Path, checkpoint: Path) -> dict[str, Any]:
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // args.tp))}
    options = SglangOptions(
        python=args.python, model=checkpoint, tp_size=args.tp, flags=_FLAGS, environment=threads
    )
    with SglangServer(options, folder / "server.log") as server:
        trainer = Trainer(checkpoint, folder, lr=max(args.rates))
        config = {
            "store": {"url": str(trainer.store)},
            "id": "bench",
            "poll_interval": 0.1,
            "state_dir": str(folder / "state"),
            "http": None,
            "engine": {"type": "sglang", "servers": [{"url": server.url}]},
        }
        (folder / "subscriber.yaml").write_text(json.dumps(config))  # YAML is a superset of JSON
        server.wait_ready()
        command = (sys.executable, "-m", "benchmarks.apply_subscriber", str(folder / "subscriber.yaml"))
        rates = []
        with Child("subscriber", command, folder / "subscriber.log") as child:
            child.call("follow", version=0, timeout=_TIMEOUT)
            child.call("follow", version=trainer.publish(_WARM_UP), timeout=_TIMEOUT)
            for lr in args.rates:
                trainer.optimizer.param_groups[0]["lr"] = lr
                rows = []
                for number in range(args.versions):
                    rows.append(measure(server, child, trainer, number))
                    _progress(rows[-1])
                rates.append({"lr": lr, "versions": rows, "medians": medians(rows), "seen": seen(rows)})
        trainer.publisher.close()
    return {
        "cpus": os.cpu_count(),
        "tp": args.tp,
        "checkpoint_bytes": rates[0]["versions"][0]["checkpoint_bytes"],
        "identical": all(row["identical"] for rate in rates for row in rate["versions"]),
        "rates": rates,
    }


def _progress(row: dict[str, Any]) -> None:
    text = f"version {row['version']}: {100 * row['share']:.2f} % changed"
    print(text + ("" if row["identical"] else "; NOT what SGLang loads"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", type=int, default=4, help="per learning rate")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--python", type=Path, default=Path(".venv-sglang/bin/python"))
    parser.add_argument("--models", type=Path, default=Path(".demo"), help="where the demo keeps its models")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="where files are kept meanwhile")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = prepare_model("smollm2", args.models)
    with tempfile.TemporaryDirectory(dir=args.work, prefix="deltasync-apply-") as folder:
        results = run(args, Path(folder), checkpoint)
    report(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if not results["identical"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
