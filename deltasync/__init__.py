"""Keep RL rollout clusters bit-identical to their trainer by shipping only the weights that changed.

The face of the project: `Publisher` for the trainer, `Subscriber` and `TorchEngine` for the rollout side, their
configs and the error tree. Names are loaded on first use, so `import deltasync` costs no torch and no boto3.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from deltasync._siblings import check_siblings

check_siblings()

if TYPE_CHECKING:
    from chunkstore.errors import Action as Action
    from chunkstore.errors import DeltasyncError as DeltasyncError
    from chunkstore.open import StoreConfig as StoreConfig
    from manifest.schema import Manifest as Manifest
    from publisher.commit import Commit as Commit
    from publisher.commit import PublishHandle as PublishHandle
    from publisher.config import PublisherConfig as PublisherConfig
    from publisher.explain import Explanation as Explanation
    from publisher.explain import explain as explain
    from publisher.group import Owned as Owned
    from publisher.group import Writer as Writer
    from publisher.publisher import Publisher as Publisher
    from publisher.share import share_optimizer_state as share_optimizer_state
    from subscriber.config import SubscriberConfig as SubscriberConfig
    from subscriber.daemon import Subscriber as Subscriber
    from subscriber.engine import Engine as Engine
    from subscriber.report import AppliedVersion as AppliedVersion
    from subscriber.torch_engine import TorchEngine as TorchEngine

_HOME: Final = {
    "Action": "chunkstore.errors",
    "AppliedVersion": "subscriber.report",
    "Commit": "publisher.commit",
    "DeltasyncError": "chunkstore.errors",
    "Engine": "subscriber.engine",
    "Explanation": "publisher.explain",
    "Manifest": "manifest.schema",
    "Owned": "publisher.group",
    "PublishHandle": "publisher.commit",
    "Publisher": "publisher.publisher",
    "PublisherConfig": "publisher.config",
    "StoreConfig": "chunkstore.open",
    "Subscriber": "subscriber.daemon",
    "SubscriberConfig": "subscriber.config",
    "TorchEngine": "subscriber.torch_engine",
    "Writer": "publisher.group",
    "explain": "publisher.explain",
    "share_optimizer_state": "publisher.share",
}
"""Public name → the module that defines it."""

__all__ = [
    "Action",
    "AppliedVersion",
    "Commit",
    "DeltasyncError",
    "Engine",
    "Explanation",
    "Manifest",
    "Owned",
    "PublishHandle",
    "Publisher",
    "PublisherConfig",
    "StoreConfig",
    "Subscriber",
    "SubscriberConfig",
    "TorchEngine",
    "Writer",
    "explain",
    "share_optimizer_state",
]


if not TYPE_CHECKING:  # type checkers know the names above, and should know no others

    def __getattr__(name: str) -> Any:
        """Load a public name on first use (PEP 562)."""
        try:
            home = _HOME[name]
        except KeyError:
            raise AttributeError(f"module 'deltasync' has no attribute {name!r}") from None
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
