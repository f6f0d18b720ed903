"""Capture speed on the CPU, against reading and copying the same memory and against the torch reference, in one run.

    python -m benchmarks.capture [--elements 100000000] [--json FILE]

Per core: one thread, one parameter of fp32 θ, m, v, in CPU seconds. The learning rate sets how much changes.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manifest.catalog import TensorSpec
from publisher.changes import ChangeSet
from publisher.find import Found, find_compiled, find_reference
from publisher.inversion import Hyper, bits16
from publisher.optimizers import StepRecord
from publisher.shard import PIECE, Shard, Source

RATES = (2.2e-8, 1.38e-7, 9.3e-7, 1.0e-5)
"""Learning rates that change about 0.2, 1, 5 and 30 % of the bf16 values here."""
BYTES = 12  # θ, m and v, fp32 each


def best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """CPU seconds of this thread in the best of some runs: what other processes on the machine take does not count."""
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


def stepped(elements: int, lr: float) -> tuple[Shard, StepRecord, float]:
    """A shard after one AdamW step at `lr`, and the share of its bf16 values that it changed."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(elements, generator=generator) * 0.02
    m = torch.randn(elements, generator=generator).mul_(1e-4)
    v = torch.rand(elements, generator=generator).mul_(1e-8).add_(1e-10)
    shard = Shard(0, TensorSpec("w", "BF16", (elements,)), old, Source.INVERSION)
    before = bits16(old, torch.bfloat16)
    hyper = Hyper(lr, 0.9, 0.95, 1e-8, 0.01)
    step = 100
    update = m.mul(lr / (1 - 0.9**step)).div_(v.sqrt().div_((1 - 0.95**step) ** 0.5).add_(1e-8))
    old.mul_(hyper.decay).sub_(update)
    share = float((bits16(old, torch.bfloat16) != before).float().mean())
    return shard, StepRecord(step, hyper, m, v), share


def run(shard: Shard, record: StepRecord, find: Callable[..., Found | None]) -> None:
    """Find and prove, piece by piece, as a capture does."""
    for start in range(0, shard.spec.numel, PIECE):
        found = find(shard, record, start, min(start + PIECE, shard.spec.numel))
        assert found is not None
        found.prove(shard.fingerprint)


def measure(elements: int, lr: float) -> dict[str, Any]:
    shard, record, share = stepped(elements, lr)
    assert record.m is not None
    assert record.v is not None
    arrays = [x.numpy() for x in (shard.tensor, record.m, record.v)]
    target = np.empty_like(arrays[0])
    shard.changes = ChangeSet.empty()
    run(shard, record, find_compiled)  # compile
    read = best_seconds(lambda: [float(x.view(np.int64).max()) for x in arrays])
    copy = best_seconds(lambda: [np.add(x, 0, out=target) for x in arrays])
    compiled = best_seconds(lambda: run(shard, record, find_compiled))
    reference = best_seconds(lambda: run(shard, record, find_reference), repeats=1)
    size = elements * BYTES / 1e9
    return {
        "changed": share,
        "read_gb_per_second": size / read,
        "copy_gb_per_second": 2 * size / copy,
        "capture_gb_per_second": size / compiled,
        "of_read": read / compiled,
        "of_copy": copy / 2 / compiled,
        "torch_reference_gb_per_second": size / reference,
        "times_reference": reference / compiled,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("changed %   read GB/s   copy GB/s   capture GB/s   of read   of copy   × torch reference")
    for lr in RATES:
        row = measure(args.elements, lr)
        rows.append(row)
        print(
            f"{100 * row['changed']:9.2f} {row['read_gb_per_second']:11.1f} {row['copy_gb_per_second']:11.1f} "
            f"{row['capture_gb_per_second']:14.2f} {row['of_read']:9.2f} {row['of_copy']:9.2f} "
            f"{row['times_reference']:19.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
