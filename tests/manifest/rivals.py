"""Two processes that race for every version of one log, through a store that cannot be relied on."""

import os
import queue
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from chunkstore.open import StoreConfig, open_store
from manifest.errors import CommitUnknown
from manifest.log import StreamInfo, VersionLog
from manifest.schema import Manifest
from manifest.settle import Patience
from tests.support.fault_proxy import CLIENT
from tests.support.manifests import STREAM_ID, make_manifest
from tests.support.processes import PROCESSES

WAIT = 60.0
"""Seconds before a stuck race fails instead of hanging."""

PATIENCE = {
    name: Patience(deadline, first_delay=0.002, longest_delay=0.05) for name, deadline in (("a", 0), ("b", 1))
}
"""One is told of every doubt, the other insists."""


@dataclass(frozen=True)
class Told:
    """What one writer was told: whether it won each version and what it was shown as the winner (its bytes)."""

    writer: str
    won: list[bool] = field(default_factory=list)
    winners: list[bytes] = field(default_factory=list)
    unknown: Counter[int] = field(default_factory=Counter)  # how often, by version


def race(config: StoreConfig, versions: int) -> list[Told]:
    """Both offer a manifest of their own for every version, and ask again until they know what became of it."""
    barrier = PROCESSES.Barrier(2)
    told: Queue[Told] = PROCESSES.Queue()
    writers = [
        PROCESSES.Process(target=write, args=(config, name, versions, barrier, told), daemon=True)
        for name in PATIENCE
    ]
    for writer in writers:
        writer.start()
    answers: list[Told] = []
    while len(answers) < len(writers):
        with suppress(queue.Empty):
            answers.append(told.get(timeout=0.2))
        assert not any(writer.exitcode for writer in writers), "see the traceback of the process"
    for writer in writers:
        writer.join(WAIT)
        assert writer.exitcode == 0
    return sorted(answers, key=lambda one: one.writer)


def write(config: StoreConfig, name: str, versions: int, barrier: Barrier, told: "Queue[Told]") -> None:
    os.environ[CLIENT] = name
    log = VersionLog(open_store(config), StreamInfo(STREAM_ID), PATIENCE[name])
    mine = Told(name)
    parent: Manifest | None = None
    for version in range(versions):
        offered = make_manifest(version, parent, base=parent, salt=name)
        barrier.wait(WAIT)
        while True:
            try:
                outcome = log.commit(offered)
                break
            except CommitUnknown:
                mine.unknown[version] += 1
        mine.won.append(outcome.won)
        mine.winners.append(outcome.winner.data)
        parent = outcome.winner
    told.put(mine)
