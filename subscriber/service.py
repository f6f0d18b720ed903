"""`deltasync subscriber run`: one process that builds the engine its config names and follows the stream."""

import asyncio
import importlib
import os
import signal
import sys
from typing import Final

from torch import nn

from chunkstore.errors import ConfigError
from subscriber.config import SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.torch_engine import TorchEngine

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def serve(config: SubscriberConfig, until_version: int | None = None, once: bool = False) -> None:
    """Run until SIGTERM, SIGINT, or as `Subscriber.run` says. Raises ConfigError if the engine cannot be built."""
    asyncio.run(_serve(Subscriber(config, load_engine(config)), until_version, once))


async def _serve(subscriber: Subscriber, until_version: int | None, once: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, subscriber.stop)
    try:
        await subscriber.run(until_version, once)
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def load_engine(config: SubscriberConfig) -> TorchEngine:
    """Call `engine.factory`, which may lie in the working directory, and wrap the module it returns.

    Raises ConfigError if there is no such function or it returns something else. What it raises itself is passed on.
    """
    if config.engine is None:
        raise ConfigError(
            "engine: is required to run a subscriber as a process",
            hint="engine: {factory: 'module:function'}, a function of yours that returns the torch module",
        )
    factory = config.engine.factory
    name, _, function = factory.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(name), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(
            f"engine.factory: {factory!r} cannot be imported: {error}",
            hint="give it as 'module:function', importable from the working directory",
        ) from error
    module = build()
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"engine.factory: {factory!r} returned a {type(module).__name__}, not a torch.nn.Module"
        )
    return TorchEngine(module)
