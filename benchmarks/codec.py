"""Size and speed of the chunk encodings against the entropy and against public formats, in one run, on one core.

    python -m benchmarks.codec [--lr 1e-6] [--warmup 150] [--json FILE]

On random masks, and on versions recorded from a model in training. Floor: entropy of the mask plus entropy of the
differences, both as if independent; real changes are not, so they can go below it. Rates are best of several runs, in
millions of changed elements per second of one thread's CPU time.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.changes import random_mask, recorded
from benchmarks.formats import FORMATS, Change
from chunkstore import difference
from chunkstore.codec import (
    WINDOW,
    ChunkReader,
    Encoding,
    Section,
    encode_section,
    group_sections,
    pack_chunk,
)

DENSITIES: Final = (0.002, 0.01, 0.05, 0.30)
STEPS: Final = (1, 4, 16)  # per recorded version
_CHUNK: Final = 16 << 20  # bytes of frames that a chunk takes
_REPEATS: Final = 5
_HEADER: Final = "    {:26s} {:>12s} {:>9s} {:>12s} {:>12s}"
_ROW: Final = "    {:26s} {:12.2f} {:9.3f} {:12.1f} {:>12s}"


def sections(changes: list[Change], encoding: Encoding) -> Iterator[Section]:
    """What a publisher would encode; `encoding` decides what it knows: old values, only new ones, or whole tensors."""
    for tensor, change in enumerate(changes):
        for start in range(0, len(change.new), WINDOW):
            stop = min(start + WINDOW, len(change.new))
            if encoding is Encoding.DENSE:
                yield Section(tensor, "BF16", start, stop, None, change.new[start:stop])
                continue
            first, last = np.searchsorted(change.at, [start, stop])
            at = change.at[first:last]
            if len(at):
                old = change.old[at] if encoding is Encoding.DELTA else None
                offsets = (at - start).astype(np.uint32)
                yield Section(tensor, "BF16", start, stop, offsets, change.new[at], old=old)


def floor(changes: list[Change]) -> float:
    """Bits per changed element: entropy of the mask plus that of the differences."""
    changed = sum(len(change.at) for change in changes)
    share = changed / sum(len(change.new) for change in changes)
    moved = np.concatenate([difference.difference(c.new[c.at], c.old[c.at]) for c in changes])
    counts = np.bincount(moved)
    of_values = counts[counts > 0] / changed
    mask = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    return float(mask - (of_values * np.log2(of_values)).sum())


def seconds(work: Callable[[], object]) -> float:
    """CPU time of this thread in the best of several runs."""
    times = []
    for _ in range(_REPEATS):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


def measure(label: str, changes: list[Change]) -> dict[str, Any]:
    """Print and return one table: each encoding and each public format on one change set."""
    changed = sum(len(change.at) for change in changes)
    elements = sum(len(change.new) for change in changes)
    least = floor(changes)
    print(f"\n{label}: {changed} of {elements} elements changed ({100 * changed / elements:.3f} %)")
    print(_HEADER.format("", "bits/changed", "× floor", "encode M/s", "decode M/s"))
    print(f"    {'floor':26s} {least:12.2f} {1:9.3f}")
    rows: dict[str, dict[str, float]] = {}
    for encoding in Encoding:
        rows[encoding.value] = _ours(changes, encoding, changed)
    for name, encode in FORMATS.items():
        bits = encode(changes) * 8 / changed
        rate = changed / seconds(lambda encode=encode: encode(changes)) / 1e6  # type: ignore[misc]
        rows[name] = {"bits_per_changed": bits, "encode_millions_per_second": rate}
    for name, row in rows.items():
        row["of_floor"] = row["bits_per_changed"] / least
        decode = row.get("decode_millions_per_second")
        shown = "" if decode is None else f"{decode:.1f}"
        print(
            _ROW.format(
                name, row["bits_per_changed"], row["of_floor"], row["encode_millions_per_second"], shown
            )
        )
    return {
        "change_set": label,
        "changed": changed,
        "elements": elements,
        "floor_bits": least,
        "formats": rows,
    }


def _ours(changes: list[Change], encoding: Encoding, changed: int) -> dict[str, float]:
    parts = list(sections(changes, encoding))
    encoded = [encode_section(section) for section in parts]
    chunks = [pack_chunk(group) for group in group_sections(encoded, _CHUNK)]
    readers = [ChunkReader(data, name="benchmark") for data in chunks]
    places = [(reader, i) for reader in readers for i in range(len(reader.sections))]
    # `dense` stores every element, so its rate is of stored ones.
    stored = changed if encoding is not Encoding.DENSE else sum(len(c.new) for c in changes)
    encode = seconds(lambda: [encode_section(section) for section in parts])
    decode = seconds(lambda: [reader.decode(i) for reader, i in places])
    return {
        "bits_per_changed": sum(map(len, chunks)) * 8 / changed,
        "encode_millions_per_second": stored / encode / 1e6,
        "decode_millions_per_second": stored / decode / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of the recorded versions")
    parser.add_argument("--warmup", type=int, default=150, help="training steps before recording")
    parser.add_argument("--json", type=Path, help="write the tables here")
    args = parser.parse_args()
    tables = [measure(f"random mask, {100 * density:g} %", [random_mask(density)]) for density in DENSITIES]
    for steps, changes in zip(STEPS, recorded(args.lr, args.warmup, STEPS), strict=True):
        tables.append(measure(f"recorded, lr {args.lr:g}, steps per version: {steps}", changes))
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
