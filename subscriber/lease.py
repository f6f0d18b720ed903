"""Publish the status object, which is a subscriber's lease: at once, soon, or when it is time."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from chunkstore.crashpoints import crash_point
from chunkstore.errors import DeltasyncError
from chunkstore.store import Store
from manifest.keys import status_key
from subscriber.poll import sleep_until
from subscriber.report import Report, event
from subscriber.threads import in_thread

_SOON: Final = 0.1  # of the interval: how long after the last status object news may wait for the next
_LAST_WORD: Final = 2.0  # seconds for the status object that says "stopped"


class Lease:
    """Keeps the status object in `store` up to date with `report`; `interval`: seconds between renewals at most.

    That it cannot be written is reported, and must not stop the weights. `clock`: monotonic seconds; `uniform`: random
    numbers in [0, 1).
    """

    def __init__(
        self,
        store: Store,
        report: Report,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._report = report
        self._interval = interval
        self._clock = clock
        self._uniform = uniform
        self._writing = asyncio.Lock()
        self._news = asyncio.Event()
        self._untold = False  # something that the status object does not say yet
        # When it was last written. Not at once: until it is known what is held, the lease of the life before counts.
        self._told = clock()

    async def renew(self) -> None:
        """Write it now."""
        # Goes on if the caller is cancelled: what is being written must not land after the last word.
        await asyncio.shield(asyncio.create_task(self._write()))

    def tell(self) -> None:
        """Write soon what it does not say yet; many changes share one writing."""
        self._untold = True
        self._news.set()

    async def run(self) -> None:
        """For ever: write when there is news, but not much more often than it is to be renewed anyway."""
        while True:
            left = self.left()
            if left > 0:
                await sleep_until(self._news, left)
            else:
                await self.renew()

    def left(self) -> float:
        """Seconds until it is to be written, not above 0 if now."""
        # Renewed early by chance, so that a fleet that was started at one moment does not write at one moment.
        share = _SOON if self._untold else 0.8 + 0.2 * self._uniform()
        return self._told + share * self._interval - self._clock()

    async def end(self) -> None:
        """The last word: it is stopped."""
        self._report.stopped()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.renew(), _LAST_WORD)

    async def _write(self) -> None:
        async with self._writing:  # one after the other, so that the last one written is the newest
            self._untold, self._told = False, self._clock()
            data = self._report.status().model_dump_json(indent=1).encode()
            try:
                crash_point("subscriber.before_status")
                await in_thread(lambda _: self._store.put(status_key(self._report.id), data))
                crash_point("subscriber.after_status")
            except DeltasyncError as error:
                self._report.metrics.errors.labels(error.kind).inc()
                fields = {"kind": error.kind, "error": error, "needs": "put under subscribers/"}
                event("status_not_written", logging.WARNING, **fields)
