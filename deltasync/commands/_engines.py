"""The engines that a subscriber.yaml names."""

from pathlib import Path
from typing import TYPE_CHECKING

from chunkstore.errors import ConfigError
from deltasync.commands._daemon import load_function, user_errors
from subscriber.config import EngineConfig, SGLangEngineConfig, SubscriberConfig, TorchEngineConfig
from subscriber.engine import Engine

if TYPE_CHECKING:
    from subscriber.torch_engine import TorchEngine


def engine_config(config: SubscriberConfig, path: Path) -> EngineConfig:
    """What the config says of its engine. Raises ConfigError if it names none."""
    if config.engine is None:
        raise ConfigError(f"{path}: engine: is required to run a daemon", hint="name the engine to drive")
    return config.engine


def engines(config: SubscriberConfig, path: Path) -> dict[str, Engine]:
    """All engines to drive, by server. Raises ConfigError."""
    chosen = engine_config(config, path)
    if not isinstance(chosen, SGLangEngineConfig):
        return {"torch": torch_engine(chosen, path)}

    from subscriber.sglang.engine import SGLangEngine

    folder = config.staging_path / "engines"
    return {server.name: SGLangEngine(chosen, server, folder / server.name) for server in chosen.servers}


def torch_engine(config: TorchEngineConfig, path: Path) -> "TorchEngine":
    """The module that the config's factory makes, as an engine. Raises ConfigError."""
    factory = load_function(config.factory, f"{path}: engine.factory")

    from torch import nn

    from subscriber.torch_engine import TorchEngine

    with user_errors(f"{path}: engine.factory: {config.factory!r}"):
        module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{path}: engine.factory: {config.factory!r} returned {type(module).__name__}, not a torch.nn.Module",
            hint="return the model that serves",
        )
    return TorchEngine(module)
