"""`deltasync publisher run`: the publisher beside the trainer, in a process of its own."""

import argparse
from pathlib import Path

from deltasync.commands._common import Commands, add_log_level


def register(commands: Commands) -> None:
    parser = commands.add_parser("publisher", help="the trainer side's daemon")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run_parser = actions.add_parser(
        "run",
        help="publish what a trainer shares",
        description="Publish for the trainer of a publisher.yaml until SIGTERM or Ctrl-C, which stop it cleanly.",
    )
    run_parser.add_argument("-c", "--config", type=Path, required=True, metavar="FILE", help="publisher.yaml")
    add_log_level(run_parser)
    run_parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from chunkstore.config import load_config
    from deltasync.commands._daemon import log_to_stderr, return_freed_memory
    from publisher.config import PublisherConfig
    from publisher.service import run_publisher

    log_to_stderr(args.log_level)
    return_freed_memory()
    return run_publisher(load_config(args.config, PublisherConfig))
