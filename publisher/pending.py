"""One try of a writer other than the first at one version, and what becomes of it."""

import secrets
from concurrent.futures import Future
from dataclasses import dataclass, field

from manifest.parts import Call
from manifest.schema import Manifest
from publisher.commit import Commit
from publisher.tracking import Taken


@dataclass(frozen=True)
class Outcome:
    """What became of an attempt. `manifest`: what its version is, if it exists. `ended`: the call that ended it."""

    won: bool
    manifest: Manifest | None = None
    ended: Call | None = None


@dataclass
class Pending:
    """This writer's try at one version. `taken` is kept until the outcome is known.

    `first`: number of its first chunk, random, so that no two processes of one rank ever share a key. `sealed`: what it
    sends is complete. `answered`: the part may be stored, so only the log can tell. `over`: nobody waits for it.
    """

    base: Manifest | None
    train_step: int | None
    taken: Taken = field(default_factory=Taken)
    first: int = field(default_factory=lambda: secrets.randbits(48))
    called: "Future[Call]" = field(default_factory=Future)
    future: "Future[Commit | None]" = field(default_factory=Future)
    sealed: bool = False
    answered: bool = False
    over: bool = False
    outcome: Outcome | None = None

    @property
    def version(self) -> int:
        return 0 if self.base is None else self.base.version + 1
