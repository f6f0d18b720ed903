"""`deltasync subscriber run`: the rollout side's daemon."""

import argparse
import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from deltasync.commands._common import Commands, add_log_level, version_number

if TYPE_CHECKING:
    from subscriber.config import SubscriberConfig
    from subscriber.engine import Engine
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
    from chunkstore.config import load_config
    from deltasync.commands._daemon import log_to_stderr
    from subscriber.config import SubscriberConfig
    from subscriber.fleet import Fleet

    log_to_stderr(args.log_level)
    config = load_config(args.config, SubscriberConfig)
    asyncio.run(_run(Fleet(config, _engines(config, args.config)), args.until_version, args.once))
    return 0


async def _run(fleet: "Fleet", until_version: int | None, once: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, fleet.stop)
    await fleet.run(until_version, once)


def _engines(config: "SubscriberConfig", path: Path) -> "dict[str, Engine]":
    """The engines that the config names, by server. Raises ConfigError."""
    from chunkstore.errors import ConfigError
    from subscriber.config import SGLangEngineConfig

    if config.engine is None:
        raise ConfigError(f"{path}: engine: is required to run a daemon", hint="name the engine to drive")
    if isinstance(config.engine, SGLangEngineConfig):
        from subscriber.sglang.engine import SGLangEngine

        engines = config.staging_path / "engines"
        return {
            server.name: SGLangEngine(config.engine, server, engines / server.name)
            for server in config.engine.servers
        }
    return {"torch": _torch_engine(config.engine.factory, path)}


def _torch_engine(name: str, path: Path) -> "Engine":
    from chunkstore.errors import ConfigError
    from deltasync.commands._daemon import load_function, user_errors

    factory = load_function(name, f"{path}: engine.factory")

    from torch import nn

    from subscriber.torch_engine import TorchEngine

    with user_errors(f"{path}: engine.factory: {name!r}"):
        module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{path}: engine.factory: {name!r} returned {type(module).__name__}, not a torch.nn.Module",
            hint="return the model that serves",
        )
    return TorchEngine(module)
