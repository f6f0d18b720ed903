"""What the daemon needs of an engine: say what you hold, check an update, write it.

While an engine is held it serves nothing, until `release` or a scatter that succeeded; one in this process starts held.
Calls come one by one, `attach` first, and once more after EngineRestarted, which every other call may raise.
"""

from dataclasses import dataclass
from typing import Protocol

from chunkstore.digest import U64
from manifest.catalog import Catalog
from subscriber.staging import StagedUpdate


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine really holds.

    `version`: the last one that a scatter completed or a release named in this process, else None.
    `digests`: of the live bits, one per catalog tensor.
    """

    version: int | None
    digests: U64


@dataclass(frozen=True, slots=True)
class Prepared:
    """An update that was checked against the live weights and may be written.

    `staged`: what was given to `prepare`, every difference resolved, so that it may be written again after a crash.
    `token`: names the live weights' state when they were read; None if it does not matter what is live, which
    makes it a repair. `changed`: elements whose bits will differ, None where the old values were not read.
    """

    staged: StagedUpdate
    token: bytes | None
    changed: int | None


@dataclass(frozen=True, slots=True)
class Scattered:
    """`pause_seconds`: how long nothing was served; `write_seconds`: the part of it spent on writing."""

    version: int
    pause_seconds: float
    write_seconds: float


class Engine(Protocol):
    """An inference engine whose weights can be read and written in place."""

    async def attach(self) -> str:
        """Reach the engine, and leave it serving or held as it is.

        Returns its boot id, which changes whenever the weights may have been lost; letters, digits, `.`, `_`, `-`.
        Raises EngineFailed while it cannot be reached, EngineMismatch if it is none that can be driven.
        """

    async def check(self) -> str | None:
        """Whether this is still the engine, and the weights, that were left behind: cheap, and called often.

        Returns why it serves nothing although it was released; None if it serves, or is held.
        Raises EngineRestarted, EngineChanged if somebody else has written weights, EngineFailed.
        """

    async def state(self, catalog: Catalog) -> EngineState:
        """Read all live weights. Raises EngineMismatch naming every tensor that does not fit the catalog."""

    async def prepare(self, staged: StagedUpdate) -> Prepared:
        """Read only, while serving: resolve differences against what is live, and check that the update turns it into
        the manifest's digests.

        Raises EngineMismatch, VerificationFailed, StagedLost, StagingFull, StagingUnavailable; nothing was
        written.
        """

    async def scatter(self, prepared: Prepared) -> Scattered:
        """Pause, write, resume. May be repeated, also by another process. After an error the engine stays held.

        Raises EngineBusy if nothing was written and what was served before is served on; EngineChanged before the
        first write if what is live is not what was prepared for. A repair ends with a full digest before anything is
        served: VerificationFailed.
        """

    async def hold(self, reason: str) -> None:
        """Serve nothing more, after what is being served now, until a release or a scatter that succeeds."""

    async def release(self, version: int) -> None:
        """Serve: the live weights were found to be `version`."""
