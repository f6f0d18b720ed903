"""`deltasync store verify`: re-read every object of a stream and recompute every digest."""

import argparse

from deltasync.commands._common import Commands, add_store_options


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="re-read every object and recompute every digest",
        description="Re-read every object of a stream and recompute every digest. Exit code 1 if anything is damaged.",
    )
    add_store_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    raise NotImplementedError
