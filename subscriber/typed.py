"""An engine whose every failure is a typed error: what one engine does is told of it, and ends nothing for others."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from chunkstore.errors import DeltasyncError
from manifest.catalog import Catalog
from subscriber.engine import Engine, EngineState, Prepared, Scattered
from subscriber.errors import EngineFault
from subscriber.report import event, log
from subscriber.staging import StagedUpdate


@contextmanager
def typed(doing: str) -> Iterator[None]:
    """Turn whatever the block raises, and should not have, into an EngineFault; its traceback goes to the log."""
    try:
        yield
    except DeltasyncError:
        raise
    except Exception as error:  # an engine talks to foreign programs, and may itself be somebody's own
        what = f"{type(error).__name__}: {error}"
        event("engine_fault", logging.ERROR, doing=doing, error=what)
        log.error("the traceback of that engine_fault", exc_info=error)
        raise EngineFault(f"{doing} raised {what:.500}") from error


class TypedEngine:
    """`engine`, of which every call raises DeltasyncError and nothing else."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def attach(self) -> str:
        with typed("attaching"):
            return await self._engine.attach()

    async def check(self) -> str | None:
        with typed("checking the engine"):
            return await self._engine.check()

    async def state(self, catalog: Catalog) -> EngineState:
        with typed("reading the live weights"):
            return await self._engine.state(catalog)

    async def prepare(self, staged: StagedUpdate) -> Prepared:
        with typed(f"preparing version {staged.target.version}"):
            return await self._engine.prepare(staged)

    async def scatter(self, prepared: Prepared) -> Scattered:
        with typed(f"writing version {prepared.staged.target.version}"):
            return await self._engine.scatter(prepared)

    async def hold(self, reason: str) -> None:
        with typed("holding the engine"):
            await self._engine.hold(reason)

    async def release(self, version: int) -> None:
        with typed("releasing the engine"):
            await self._engine.release(version)
