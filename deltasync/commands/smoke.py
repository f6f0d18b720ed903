"""`deltasync smoke`: is this cluster wired correctly, step by step."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from chunkstore.words import counted
from deltasync.commands._common import Commands
from deltasync.commands._steps import Telling

if TYPE_CHECKING:
    from chunkstore.steps import Steps


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "smoke",
        help="check a subscriber's wiring step by step",
        description="Check what a subscriber.yaml describes: store, stream, directories and engine, and which version "
        "the live weights are. Changes nothing and may run beside the daemon.",
    )
    parser.add_argument("-c", "--config", type=Path, required=True, metavar="FILE", help="subscriber.yaml")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio

    telling = Telling(json=args.json)
    asyncio.run(_smoke(telling.steps, args.config))
    return telling.end("all is well")


async def _smoke(steps: "Steps", path: Path) -> None:
    from chunkstore.config import load_config
    from deltasync.commands._engines import engine_config, torch_engine
    from subscriber.config import SGLangEngineConfig, SubscriberConfig, TorchEngineConfig
    from subscriber.engine import Engine
    from subscriber.smoke import smoke

    read: list[SubscriberConfig] = []

    async def read_config() -> str:
        config = load_config(path, SubscriberConfig)
        engine = engine_config(config, path)
        read.append(config)
        if not isinstance(engine, SGLangEngineConfig):
            return f"{path}: subscriber {config.id}, a module"

        from subscriber.sglang.http import key_of

        key_of(engine, f"{path}")
        return f"{path}: subscriber {config.id}, {counted(len(engine.servers), 'server')}"

    def make_engine() -> Engine:
        engine = read[0].engine
        assert isinstance(engine, TorchEngineConfig), "asked for only then"
        return torch_engine(engine, path)

    await steps.do("config", read_config)
    if read:
        await smoke(steps, read[0], make_engine)
