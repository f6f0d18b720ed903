"""The subscriber: follow one stream for ever and keep one engine at its newest version."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chunkstore.config import settings_of
from subscriber.config import SubscriberConfig
from subscriber.engine import Engine
from subscriber.fleet import Fleet
from subscriber.report import AppliedVersion, Report

__all__ = ["AppliedVersion", "Subscriber"]


class Subscriber(Fleet):
    """Follows the store of `config` and drives `engine`: a fleet of one, which says how it runs, ends and stops.

    `config`: itself, the same keys as a mapping, or the path of a subscriber.yaml, of which `engine` is not used.
    `on_applied(applied)` is called after each apply was recorded. Raises ConfigError.
    """

    def __init__(
        self,
        config: SubscriberConfig | Mapping[str, Any] | Path | str,
        engine: Engine,
        on_applied: Callable[[AppliedVersion], None] | None = None,
    ) -> None:
        settings = settings_of(config, SubscriberConfig, source="the config given to Subscriber")
        super().__init__(
            settings,
            {settings.id: engine},
            None if on_applied is None else lambda _, applied: on_applied(applied),
        )
        self.engine = engine

    @property
    def report(self) -> Report:
        """What is known of the engine."""
        return self.reports[self.config.id]

    @property
    def version(self) -> int | None:
        """The version the engine serves, or None."""
        return self.versions[self.config.id]
