"""A subscriber process of one server, to be killed: argv[1] is its subscriber.yaml as JSON."""

import asyncio
import json
import sys

from chunkstore.config import parse_config
from subscriber.config import SGLangEngineConfig, SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.sglang.engine import SGLangEngine


def main() -> None:
    config = parse_config(json.loads(sys.argv[1]), SubscriberConfig, source="argv")
    assert isinstance(config.engine, SGLangEngineConfig)
    engine = SGLangEngine(config.engine, config.engine.servers[0], config.staging_path / "engine")
    asyncio.run(Subscriber(config, engine).run(once=True))


if __name__ == "__main__":
    main()
