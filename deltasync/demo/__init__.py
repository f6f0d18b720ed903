"""`deltasync demo`: a real online RL loop over deltasync, in separate processes.

A trainer, a publisher that shares the trainer's memory, a store, and a rollout worker that starts without weights: a
model with a subscriber in one process, or an SGLang server with a subscriber daemon beside it. After every version the
live weights are compared, bit for bit, with the trainer's.
Importing this is cheap.
"""

import argparse
from pathlib import Path
from typing import Final

MODEL_NAMES: Final = ("smollm2", "tiny")
ENGINES: Final = ("torch", "sglang")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `deltasync demo`."""
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="torch",
        help="what generates: a module, or a real SGLang server (default: %(default)s)",
    )
    parser.add_argument(
        "--sglang-python",
        type=Path,
        metavar="PYTHON",
        help="interpreter of SGLang's environment; default: .venv-sglang here or in the repository",
    )
    parser.add_argument(
        "--store",
        choices=("posix", "s3"),
        default="posix",
        help="what to publish through (default: %(default)s)",
    )
    parser.add_argument(
        "--store-url",
        metavar="URL",
        help="a folder for posix, s3://bucket/prefix for s3; default: a folder of the run, an S3 server of the run",
    )
    parser.add_argument(
        "--endpoint-url", metavar="URL", help="with --store-url s3://…: an S3 server that is not AWS"
    )
    parser.add_argument(
        "--versions",
        type=_positive,
        default=6,
        metavar="N",
        help="versions to train after the anchor (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        choices=MODEL_NAMES,
        default="smollm2",
        help="tiny: random weights, for a quick run (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON document on stdout")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep the run's store, logs and comparison files in DIR (new or empty)",
    )


def run(args: argparse.Namespace) -> int:
    """0 if every version arrived bit-identical, else 1. Raises DeltasyncError if a process of the demo fails."""
    from deltasync.demo.main import run_demo

    return run_demo(args)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value
