"""Two processes that race for the same keys with put_if_absent."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from chunkstore.open import StoreConfig, open_store

WAIT = 60.0  # seconds before a stuck race fails instead of hanging


@dataclass(frozen=True)
class Raced:
    """For one key: whether each of the two writers was told that it won, and the bytes kept."""

    key: str
    won: tuple[bool, bool]
    kept: bytes

    @property
    def fair(self) -> bool:
        """Exactly one winner, whose bytes are kept."""
        return self.won in ((True, False), (False, True)) and self.kept == body(
            self.key, self.won.index(True)
        )


def body(key: str, writer: int) -> bytes:
    return f"{key} by writer {writer}".encode()


def race(config: StoreConfig, keys: Sequence[str]) -> list[Raced]:
    """Let two new processes put every key at the same moment; report what each was told and what the store kept."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    told: Queue[tuple[int, list[bool]]] = context.Queue()
    writers = [context.Process(target=_write, args=(config, keys, n, barrier, told)) for n in range(2)]
    for writer in writers:
        writer.start()
    outcomes = dict(told.get(timeout=WAIT) for _ in writers)
    for writer in writers:
        writer.join(WAIT)
    store = open_store(config)
    return [
        Raced(key, (outcomes[0][i], outcomes[1][i]), store.get(key, limit=1 << 10))
        for i, key in enumerate(keys)
    ]


def _write(
    config: StoreConfig,
    keys: Sequence[str],
    writer: int,
    barrier: Barrier,
    told: "Queue[tuple[int, list[bool]]]",
) -> None:
    store = open_store(config)
    store.head(keys[0])  # connect before the start
    won = []
    for key in keys:
        barrier.wait(WAIT)
        won.append(store.put_if_absent(key, body(key, writer)))
    told.put((writer, won))
