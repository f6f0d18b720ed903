"""Is the stream at the URL still the one that was connected to? A prefix can be deleted and created again."""

import random
import time

from chunkstore.errors import DeltasyncError
from manifest.errors import ForeignStream
from manifest.keys import STREAM
from manifest.log import VersionLog, open_stream
from subscriber.report import Report
from subscriber.threads import in_thread


class Identity:
    """The record of `log.stream`, which was just read, is read again every `interval` seconds and whenever `doubt` was
    called.
    """

    def __init__(self, log: VersionLog, interval: float, report: Report) -> None:
        self._log = log
        self._id = log.stream.id
        self._interval = interval
        self._report = report
        self._due = time.monotonic() + interval * random.uniform(0.8, 1.2)
        self._unconfirmed = False

    def doubt(self) -> None:
        """Something was met that a replaced stream would explain: look at the next occasion."""
        self._due = 0.0

    async def replaced(self) -> ForeignStream | None:
        """The error to report if another stream is there now.

        A record that is missing or unreadable is reported and changes nothing: every manifest names its stream.
        """
        if time.monotonic() < self._due:
            return None
        self._due = time.monotonic() + self._interval * random.uniform(0.8, 1.2)
        try:
            now = (await in_thread(lambda _: open_stream(self._log.store, self._log.trust))).id
        except DeltasyncError as error:
            self._report.failed(error)
            self._unconfirmed = True
            return None
        if now != self._id:
            return ForeignStream(
                f"{self._log.store.url}/{STREAM} is now stream {now.hex()}, it was {self._id.hex()}",
                hint="the stream was replaced; the subscriber starts anew from an anchor of the new one",
            )
        if self._unconfirmed:
            self._unconfirmed = False
            self._report.recovered()
        return None
