"""`deltasync smoke`: is this cluster wired correctly, step by step."""

import argparse
import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from deltasync.commands._common import Commands, counted, print_json

if TYPE_CHECKING:
    from subscriber.checks import Step, Steps

_WORDS = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}


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
    from subscriber.checks import Steps

    done: list[Step] = []

    def tell(step: "Step") -> None:
        done.append(step)
        if not args.json:
            print("\n".join(_lines(step)), flush=True)

    steps = Steps(tell)
    asyncio.run(_smoke(steps, args.config))
    failed = sum(step.outcome == "failed" for step in done)
    if args.json:
        print_json({"ok": steps.ok, "steps": [asdict(step) for step in done]})
    else:
        print("all is well" if steps.ok else f"{counted(failed, 'step')} failed")
    return 0 if steps.ok else 1


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
        servers = len(engine.servers) if isinstance(engine, SGLangEngineConfig) else 0
        return f"{path}: subscriber {config.id}, " + (counted(servers, "server") if servers else "a module")

    def make_engine() -> Engine:
        engine = read[0].engine
        assert isinstance(engine, TorchEngineConfig), "asked for only then"
        return torch_engine(engine, path)

    await steps.do("config", read_config)
    if read:
        await smoke(steps, read[0], make_engine)


def _lines(step: "Step") -> list[str]:
    where = step.name if step.server is None else f"{step.server}: {step.name}"
    lines = [f"{_WORDS[step.outcome]:8}{where}: {step.detail}"]
    if step.outcome == "ok":
        lines[0] += f" ({step.seconds:.2f} s)"
    if step.outcome == "failed":
        lines[0] = f"{_WORDS[step.outcome]:8}{where}: error[{step.kind}]: {step.detail}"
    if step.hint:
        lines.append(f"{'':8}hint: {step.hint}")
    return lines
