"""What publishing costs real trainers, against the framework's own full save at the same versions of the same run.

For each layout: how long the trainer is held per optimizer step and per publish, and bytes per version; how long the
framework's own save of the model's weights holds it, and how many bytes that writes. Which is measured is what is
installed: torch's trainers against `torch.distributed.checkpoint`, Megatron-Core against its `dist_checkpointing`,
DeepSpeed against `save_16bit_model`. Gloo on the CPU; times are the slowest rank's medians.

    .venv/bin/python -m benchmarks.trainers --parameters 20 --json trainers.json
    .venv-megatron/bin/python -m benchmarks.trainers
    .venv-deepspeed/bin/python -m benchmarks.trainers
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import distributed
from torch.optim import Optimizer

import deltasync

LR: Final = 1e-6
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
"""Of a Llama, whose `intermediate_size` says how many parameters it has."""


class Trainer(Protocol):
    """One rank. `stepping`: the optimizers whose hooks the publisher uses."""

    stepping: Sequence[Optimizer]

    def attach(self, stream: Path) -> deltasync.Publisher | None:
        """None on a rank that does not publish."""

    def step(self) -> None:
        """One step of the optimizer."""

    def save(self, folder: Path) -> None:
        """The framework's own save of all weights. Collective."""


class Framework(Protocol):
    """A module beside this one: the layouts it has, and their trainers."""

    NAMES: Sequence[str]

    def ranks(self, name: str) -> int: ...

    def trainer(self, name: str, parameters: int, folder: Path) -> AbstractContextManager[Trainer]:
        """Of this rank. Collective."""


def framework() -> Framework:
    """What is installed here."""
    found = next((name for name in ("megatron", "deepspeed") if find_spec(name)), "torch")
    module: Framework = import_module(f"benchmarks.trainers_{found}")
    return module


def shape(parameters: int) -> dict[str, Any]:
    """Of a Llama of about so many parameters."""
    width, layers = SHAPE["hidden_size"], SHAPE["num_hidden_layers"]
    each = parameters / layers - 4 * width**2
    middle = max(64, int((each - 2 * SHAPE["vocab_size"] * width / layers) / (3 * width)) // 64 * 64)
    return SHAPE | {"intermediate_size": middle}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call that all ranks begin together, and its result."""
    distributed.barrier()
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


class Held:
    """Seconds that the publisher's hooks took: those before it and after it are this one's."""

    def __init__(self, trainer: Trainer) -> None:
        self.seconds, self._since = 0.0, 0.0
        self._trainer = trainer
        for optimizer in trainer.stepping:
            optimizer.register_step_post_hook(self._begin)

    def attached(self) -> None:
        for optimizer in self._trainer.stepping:
            optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._since


def measure(trainer: Trainer, folder: Path, versions: int, steps: int) -> dict[str, float]:
    """One rank's medians."""
    times: dict[str, list[float]] = {key: [] for key in ("step", "hook", "publish", "commit", "save")}
    counts: dict[str, list[float]] = {"bytes": [], "changed": []}
    held = Held(trainer)
    publisher = trainer.attach(folder / "stream")
    held.attached()
    for version in range(versions):
        for _ in range(steps):
            held.seconds = 0.0
            seconds, _ = timed(trainer.step)
            times["step"].append(seconds - held.seconds)
            times["hook"].append(held.seconds)
        publish = (lambda: None) if publisher is None else partial(publisher.publish, version)
        seconds, handle = timed(publish)
        if handle is not None:
            begin = time.perf_counter()
            commit = handle.result()
            assert commit is not None
            times["publish"].append(seconds)
            times["commit"].append(seconds + time.perf_counter() - begin)
            counts["bytes"].append(commit.manifest.nbytes + len(commit.manifest.data))
            counts["changed"].append(commit.manifest.stats.changed / commit.manifest.stats.elements)
        times["save"].append(timed(partial(trainer.save, folder / "saved" / str(version)))[0])
    found = {key: statistics.median(values) for key, values in (times | counts).items() if values}
    if publisher is not None:
        found["bf16_bytes"] = sum(spec.nbytes for spec in publisher.catalog.tensors)
        publisher.close()
    distributed.barrier()
    anchor = size(folder / "stream" / "chunks" / f"{0:020d}")
    return found | {"saved_bytes": size(folder / "saved" / "0"), "anchor_bytes": anchor}


def rank_main(name: str, rank: int, folder: str, options: dict[str, int], results: Any) -> None:
    kind, root = framework(), Path(folder)
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=kind.ranks(name))
    with kind.trainer(name, options["parameters"], root) as trainer:
        results[rank] = measure(trainer, root, options["versions"], options["steps"])
    distributed.destroy_process_group()


def run(name: str, ranks: int, options: dict[str, int]) -> dict[str, float]:
    """One layout, all its ranks as processes; times are the slowest rank's."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Manager() as manager:
        results = manager.dict()
        processes = [
            context.Process(target=rank_main, args=(name, rank, folder, options, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{name}: a rank has failed")
        told = dict(results).values()
    keys = dict.fromkeys(key for one in told for key in one)
    return {key: max(one.get(key, 0) for one in told) for key in keys} | {"ranks": ranks}


def main() -> None:
    kind = framework()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=20.0, help="millions (default 20)")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps per version")
    parser.add_argument("--only", choices=kind.NAMES, action="append", help="some of the layouts")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    options = {"parameters": int(args.parameters * 1e6), "versions": args.versions, "steps": args.steps}
    results: dict[str, Any] = {"cpus": os.cpu_count(), **options}
    print(
        f"{'':26} {'own step':>9} {'held/step':>10} {'held/publish':>13} {'full save':>10} {'ratio':>6} "
        f"{'changed':>8} {'sent':>8} {'full save':>10} {'ratio':>6} {'anchor/bf16':>12} {'load':>6}"
    )
    for name in args.only or kind.NAMES:
        r = results[name] = run(name, kind.ranks(name), options) | {"load": os.getloadavg()[0]}
        print(
            f"{name:26} {r['step'] * 1e3:7.0f}ms {r['hook'] * 1e3:8.1f}ms {r['publish'] * 1e3:11.1f}ms "
            f"{r['save'] * 1e3:8.0f}ms {r['save'] / (r['publish'] + args.steps * r['hook']):6.1f} "
            f"{r['changed']:8.2%} {r['bytes'] / 1e6:6.2f}MB {r['saved_bytes'] / 1e6:8.1f}MB "
            f"{r['saved_bytes'] / r['bytes']:6.0f} {r['anchor_bytes'] / r['bf16_bytes']:12.3f} {r['load']:6.1f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
