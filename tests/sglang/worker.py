"""A subscriber process of one server, to be killed."""

import asyncio
import json

from chunkstore.config import parse_config
from subscriber.config import SGLangEngineConfig, SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.sglang.engine import SGLangEngine


def catch_up(text: str) -> None:
    """Bring the server to the newest version. `text`: its subscriber.yaml as JSON."""
    config = parse_config(json.loads(text), SubscriberConfig, source="argv")
    assert isinstance(config.engine, SGLangEngineConfig)
    engine = SGLangEngine(config.engine, config.engine.servers[0], config.staging_path / "engine")
    asyncio.run(Subscriber(config, engine).run(once=True))
