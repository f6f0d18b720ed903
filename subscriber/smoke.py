"""Is a cluster wired correctly? Goes through a subscriber's set-up step by step, and changes nothing.

Nothing is written to the store or to an engine, nothing is paused, and all may be in use meanwhile. The only traces are
a directory of its own below `staging_path` while it runs, and the map that a server keeps once it has made one.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from chunkstore.steps import Steps
from chunkstore.words import human_bytes
from manifest.key_files import load_trust
from subscriber.checks import Stream, name_weights
from subscriber.config import SGLangEngineConfig, SubscriberConfig
from subscriber.disk import disk_errors
from subscriber.engine import Engine
from subscriber.typed import TypedEngine


async def smoke(steps: Steps, config: SubscriberConfig, torch_engine: Callable[[], Engine]) -> None:
    """Check the set-up that `config` describes.

    `torch_engine`: makes the engine of the torch kind, whose module lives in this process alone.
    """
    stream = Stream(config.store, load_trust(config.trust), references=config.base_checkpoint is not None)
    await steps.do("store", stream.reach)
    await steps.do("stream", stream.open, ("store",))
    await steps.do("versions", stream.plan, ("stream",))
    with _directory(config.staging_path) as made:
        await steps.do("staging", made.make)
        if isinstance(config.engine, SGLangEngineConfig):
            from subscriber.sglang.checks import check_server

            for server in config.engine.servers:
                await check_server(steps, stream, config.engine, server, made.path / server.name)
        else:
            await _check_module(steps, stream, torch_engine)


class _Directory:
    """Of this run, below `base`."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self.path = base / f"smoke-{uuid4().hex[:8]}"

    async def make(self) -> str:
        with disk_errors(self.path):
            self.path.mkdir(parents=True)
            (self.path / "probe").write_bytes(b"probe")
            free = shutil.disk_usage(self.path).free
        return f"{self._base} can be written; {human_bytes(free)} are free"


@contextmanager
def _directory(base: Path) -> Iterator[_Directory]:
    made = _Directory(base)
    try:
        yield made
    finally:
        shutil.rmtree(made.path, ignore_errors=True)


async def _check_module(steps: Steps, stream: Stream, torch_engine: Callable[[], Engine]) -> None:
    made: list[Engine] = []

    async def make() -> str:
        made.append(TypedEngine(torch_engine()))
        return "the factory returns a module"

    await steps.do("factory", make)
    await steps.do("weights", lambda: name_weights(stream, made[0]), ("versions", "factory"))
