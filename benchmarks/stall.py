"""How long publishing holds the trainer, per optimizer step and per publish, against the step's own time.

The same training runs twice in one process: with the publisher inside it, and with a publisher process beside it.
Held time is measured between two step post-hooks, one before and one after the publisher's own.

    python -m benchmarks.stall --parameters 20 --json stall.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from publisher.publisher import Publisher

_WIDTH = 1024
_BATCH = 256


@dataclass
class Times:
    """Seconds of each step's own work, of each hold after a step, and of each `publish` call."""

    step: list[float] = field(default_factory=list)
    hook: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        own, hook, publish = (statistics.median(x) for x in (self.step, self.hook, self.publish))
        return {
            "step_seconds": own,
            "held_per_step_seconds": hook,
            "held_per_publish_seconds": publish,
            "held_per_step_ratio": hook / own,
            "held_per_publish_ratio": publish / own,
        }


def run(config: dict[str, Any], parameters: int, versions: int, steps: int) -> Times:
    """Train a stack of linear layers of `parameters` parameters at a learning rate usual for RL."""
    torch.manual_seed(0)
    layers = max(1, round(parameters / _WIDTH**2))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    times = Times()
    stepped = [0.0]
    optimizer.register_step_post_hook(lambda *_: stepped.__setitem__(0, time.perf_counter()))
    with Publisher.attach(optimizer, model, config) as publisher:
        optimizer.register_step_post_hook(lambda *_: times.hook.append(time.perf_counter() - stepped[0]))
        for version in range(versions):
            for _ in range(steps):
                begin = time.perf_counter()
                optimizer.zero_grad()
                model(torch.randn(_BATCH, _WIDTH)).square().mean().backward()
                optimizer.step()
                times.step.append(stepped[0] - begin)
            begin = time.perf_counter()
            handle = publisher.publish(version)
            times.publish.append(time.perf_counter() - begin)
            handle.result()
    return times


@contextmanager
def sidecar(config: dict[str, Any], folder: Path) -> Iterator[None]:
    """A publisher process for `config` (YAML is a superset of JSON)."""
    path = folder / "publisher.yaml"
    path.write_text(json.dumps(config))
    command = [
        sys.executable,
        "-m",
        "deltasync.cli",
        "publisher",
        "run",
        "-c",
        str(path),
        "--log-level",
        "warning",
    ]
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=20.0, help="millions (default 20)")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps per version")
    parser.add_argument("--spool", type=Path, default=Path("/dev/shm"), help="where shared memory is made")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    count = int(args.parameters * 1e6)
    results: dict[str, Any] = {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), **{
        key: value for key, value in vars(args).items() if key not in ("json", "spool")
    }}  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as work,
        tempfile.TemporaryDirectory(dir=args.spool, prefix="deltasync-stall-") as spool,
    ):
        folder = Path(work)
        inside = {"store": {"url": str(folder / "inside")}, "inference_dtype": "bfloat16"}
        beside = {**inside, "store": {"url": str(folder / "beside")}, "spool": spool, "http": None}
        results["in_process"] = run(inside, count, args.versions, args.steps).summary()
        with sidecar(beside, folder):
            results["sidecar"] = run(beside, count, args.versions, args.steps).summary()
    print(f"{'':12} {'own step':>10} {'held/step':>10} {'ratio':>7} {'held/publish':>13} {'ratio':>7}")
    for mode in ("in_process", "sidecar"):
        r = results[mode]
        print(
            f"{mode:12} {r['step_seconds'] * 1e3:8.1f}ms {r['held_per_step_seconds'] * 1e3:8.1f}ms "
            f"{r['held_per_step_ratio']:7.2f} {r['held_per_publish_seconds'] * 1e3:11.1f}ms "
            f"{r['held_per_publish_ratio']:7.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
