"""What it costs that a shard is a box of its tensor: a quarter of a matrix's columns, against as many whole rows.

    python -m benchmarks.boxes [--json FILE]

By one thread's CPU seconds, best of some runs: millions of elements per second, and bytes per element sent whole.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

import torch
from torch.optim import AdamW

from benchmarks.capture import best_seconds
from chunkstore.codec import Section, encode_section
from chunkstore.regions import Region
from manifest.catalog import TensorSpec
from publisher.capture import CaptureStats
from publisher.find import find
from publisher.optimizers import step_records
from publisher.seal import sections, take
from publisher.shard import Shard, Source

ROWS: Final = 4096
MINE: Final = 1024
SHAPES: Final = {
    "rows": ((ROWS, MINE), None),
    "columns": ((ROWS, 4 * MINE), Region.of(0, [ROWS, MINE], [4 * MINE, 1])),
    "columns, 8 at a time": ((ROWS * MINE // 8, 32), Region.of(0, [ROWS * MINE // 8, 8], [32, 1])),
}


def measure(shape: tuple[int, int], box: Region | None) -> dict[str, Any]:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(ROWS, MINE) * 0.02)
    optimizer = AdamW([parameter], lr=1e-6, foreach=False)
    shard = Shard(0, TensorSpec("w", "BF16", shape), parameter, Source.INVERSION, box=box)
    parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer.step()
    ((_, record),) = step_records(optimizer, {id(parameter)})
    sent: list[Section] = []

    def seal() -> None:
        shard.send_whole()
        sent[:] = sections(take(shard, shard.base_digest, CaptureStats()), CaptureStats())

    millions = parameter.numel() / 1e6
    found = best_seconds(lambda: [find(shard, record, start, stop) for start, stop in shard.cuts()])
    sealed, encoded = best_seconds(seal), best_seconds(lambda: [encode_section(one) for one in sent])
    return {
        "find": millions / found,
        "seal_whole": millions / sealed,
        "encode_whole": millions / encoded,
        "bytes_per_element": sum(encode_section(one).nbytes for one in sent) / parameter.numel(),
        "sections": len(sent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: measure(*shape) for name, shape in SHAPES.items()}
    print(
        f"{'':22} {'find':>9} {'seal whole':>11} {'encode whole':>13} {'bytes/element':>14} {'sections':>9}"
    )
    for name, row in rows.items():
        print(
            f"{name:22} {row['find']:5.0f} M/s {row['seal_whole']:7.0f} M/s {row['encode_whole']:9.0f} M/s "
            f"{row['bytes_per_element']:14.4f} {row['sections']:9}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
