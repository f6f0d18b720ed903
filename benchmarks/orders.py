"""What the guard and the proof are worth, per kernel order: misses, misses without the guard, unproved blocks.

    python -m benchmarks.orders [--elements 100000000] [--json FILE]

Each order takes its element-steps over lr 1e-7 … 1e-3, weight decay 0, 0.01 and 0.1, β2 0.95 and 0.999, four steps each
from fresh moments. Fails unless nothing is missed with the guard and everything missed without it is caught.
"""

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

import torch

from tests.publisher.orders import ORDERS, Order, Tally, hypers, tally

_LEARNING_RATES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
_STEPS = 4


def measure(order: Order, elements: int) -> Tally:
    """All combinations of hyper-parameters, at least `elements` element-steps together."""
    settings = list(hypers(_LEARNING_RATES))
    numel = -(-elements // (len(settings) * _STEPS))
    total = Tally()
    for seed, hyper in enumerate(settings):
        counts = tally(order, hyper, numel, _STEPS, seed)
        for field in fields(Tally):
            setattr(total, field.name, getattr(total, field.name) + getattr(counts, field.name))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=100_000_000, help="element-steps per order")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "order              M steps   changed %   missed   without guard: missed   caught   wrong old"
        "   unproved blocks   (sparse)   extra / changed"
    )
    rows = {}
    for name, order in ORDERS.items():
        t = measure(order, args.elements)
        rows[name] = asdict(t)
        print(
            f"{name:17} {t.steps / 1e6:8.1f} {100 * t.changed / t.steps:11.2f} {t.missed:8} {t.blind_missed:23} "
            f"{t.blind_caught:8} {t.wrong:11} {t.unproved:8} of {t.blocks:5} {t.unproved_sparse:10} "
            f"{t.extra / t.changed:17.5f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    bad = [n for n, t in rows.items() if t["missed"] or t["wrong"] or t["blind_missed"] != t["blind_caught"]]
    sys.exit(f"missed, or wrong, or not caught: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
