"""`deltasync store check`: does a store offer what deltasync needs, found out by trying."""

import argparse
import json
from functools import partial

from deltasync.commands._common import Commands, add_store_options, store_config_of
from deltasync.commands._steps import Telling


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "check",
        help="find out whether a store can hold a stream",
        description="Find out by trying whether a store offers what deltasync needs: put-if-absent with one winner, "
        "also when raced for, read-after-write, listings, whole bytes. Writes below probes/ only, removes everything "
        "again, and may run beside publishers. Run it with the publisher's credentials. Exit code 1 if a step fails.",
    )
    add_store_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from chunkstore.open import open_store
    from chunkstore.qualify import qualify
    from deltasync.commands._progress import Patience

    config = store_config_of(args)
    telling = Telling(json=args.json)
    qualify(telling.steps, partial(open_store, config, Patience()))
    if telling.steps.ok:
        given = json.dumps(config.model_dump(exclude_unset=True))  # which is YAML too
        then = f"write `store: {given}` into publisher.yaml and subscriber.yaml"
    else:
        then = "do what the hints say and check again; publish nothing there before every step is ok"
    return telling.end(f"{args.url} qualifies", then)
