"""`deltasync subscriber run`: the rollout side's daemon."""

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from deltasync.commands._common import Commands, add_log_level, version_number

if TYPE_CHECKING:
    from subscriber.fleet import Fleet


def register(commands: Commands) -> None:
    parser = commands.add_parser("subscriber", help="the rollout side's daemon")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run_parser = actions.add_parser(
        "run",
        help="keep an engine at a stream's newest version",
        description="Follow the stream of a subscriber.yaml until SIGTERM or Ctrl-C, which stop it cleanly.",
    )
    run_parser.add_argument(
        "-c", "--config", type=Path, required=True, metavar="FILE", help="subscriber.yaml"
    )
    run_parser.add_argument(
        "--until-version", type=version_number, metavar="V", help="end once this version is applied"
    )
    run_parser.add_argument("--once", action="store_true", help="catch up with what is there, then end")
    add_log_level(run_parser)
    run_parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from chunkstore.config import load_config
    from deltasync.commands._daemon import log_to_stderr, return_freed_memory
    from deltasync.commands._engines import engine_config, engines
    from subscriber.config import SubscriberConfig
    from subscriber.fleet import Fleet, check_place

    log_to_stderr(args.log_level)
    return_freed_memory()
    config = load_config(args.config, SubscriberConfig)
    engine_config(config, args.config)
    check_place(config)  # before a factory loads a model, beside that of another subscriber perhaps
    asyncio.run(_run(Fleet(config, engines(config, args.config)), args.until_version, args.once))
    return 0


async def _run(fleet: "Fleet", until_version: int | None, once: bool) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, fleet.stop)
    await fleet.run(until_version, once)
