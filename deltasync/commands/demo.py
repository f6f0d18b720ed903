"""`deltasync demo`: train, publish, subscribe and compare, on this machine."""

from deltasync import demo
from deltasync.commands._common import Commands


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="a real RL loop over deltasync on this machine",
        description="Train a small language model in one process, generate with it in another, keep both in sync "
        "through a store, and compare all weights after every version.",
    )
    demo.add_arguments(parser)
    parser.set_defaults(run=demo.run)
