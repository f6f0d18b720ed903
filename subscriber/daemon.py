"""The subscriber: follow one stream for ever and keep one engine at its newest version."""

from collections.abc import Callable

from subscriber.config import SubscriberConfig
from subscriber.engine import Engine
from subscriber.fleet import Fleet
from subscriber.report import AppliedVersion, Report

__all__ = ["AppliedVersion", "Subscriber"]


class Subscriber(Fleet):
    """Follows `config.store` and drives `engine`: a fleet of one, which says how it runs, ends and stops.

    `on_applied(applied)` is called after each apply was recorded.
    """

    def __init__(
        self,
        config: SubscriberConfig,
        engine: Engine,
        on_applied: Callable[[AppliedVersion], None] | None = None,
    ) -> None:
        super().__init__(
            config,
            {config.id: engine},
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
