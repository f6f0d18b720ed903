"""Does a store offer what deltasync needs of it? Found out by trying, step by step, beside whatever lies there.

Everything is written below one fresh prefix of `probes/` and removed again.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Protocol
from uuid import uuid4

from chunkstore.errors import AccessDenied, CorruptObject, ObjectMissing, StoreUnavailable, StoreUnsuitable
from chunkstore.open import Hold
from chunkstore.probe import PROBES, require_put_if_absent, store_clock
from chunkstore.steps import Steps
from chunkstore.store import Store


class Clients(Protocol):
    """Makes clients of one store, each like another process has."""

    def __call__(self, *, page: int = ..., hold: Hold = ...) -> Store:
        """As `chunkstore.open.open_store` takes `page` and `hold`."""


_RACES: Final = ((300, 64), (20, 1 << 20))
"""Keys raced for, and bytes of each: small ones, and those that a server takes a while to store."""

_WRITERS: Final = 3
"""That race. No more: some servers let the losers wait a second, one after the other."""

_RACE_SECONDS: Final = 4.0
"""After which a race ends with fewer keys, but not below `_RACED_AT_LEAST`."""

_RACED_AT_LEAST: Final = 10

_TOGETHER: Final = 5.0
"""Seconds that writers wait for each other, of which one may have failed or been refused early."""

_SIZES: Final = (
    0,
    1,
    (64 << 10) - 1,
    64 << 10,
    (64 << 10) + 1,
    (5 << 20) - 1,
    5 << 20,
    (8 << 20) + 1,
    64 << 20,
)
"""Around where buffers, multipart and inlining begin; then the largest objects that deltasync writes."""

_ROUNDS: Final = 5
"""Objects written, replaced and deleted before the eyes of another client."""

_PAGE: Final = 3
_OFFSET: Final = 60.0
"""Seconds between two clocks from which on it is worth a word."""

_STALE: Final = "use a store with read-after-write, and no cache in front of it"

_PERMISSIONS: Final = {
    "list": "to list keys under the prefix (s3:ListBucket)",
    "missing": "to list keys under the prefix (s3:ListBucket): without it S3 denies what is not there",
    "create": "to put objects under probes/ with If-None-Match (s3:PutObject)",
    "read": "to get objects under the prefix (s3:GetObject)",
    "replace": "to put objects under probes/ (s3:PutObject without conditions)",
    "delete": "to delete objects under probes/ (s3:DeleteObject)",
}


def qualify(steps: Steps, client: Clients) -> None:
    """Do all steps on the store that `client` makes clients of."""
    trial = _Trial(client)

    def run(name: str, work: Callable[[], str], *needs: str) -> None:
        def allowed() -> str:
            try:
                return work()
            except AccessDenied as error:
                if not trial.url.startswith("s3://"):
                    raise
                needed = _PERMISSIONS.get(name, "for what the steps before have tried")
                raise AccessDenied(
                    error.message, hint=f"{error.hint}; needed here: permission {needed}"
                ) from error

        steps.run(name, allowed, needs)

    try:
        run("list", trial.reach)
        run("missing", trial.missing)
        run("create", trial.create)
        run("read", trial.read, "create")
        run("replace", trial.replace, "read")
        run("delete", trial.delete, "create", "missing")
        works = ("list", "missing", "create", "read", "replace", "delete")
        run("exclusive", trial.exclusive, "create", "read", "delete")
        run("race", trial.race, "exclusive")
        run("visible", trial.visible, *works)
        run("pages", trial.pages, "list", "create")
        run("sizes", trial.sizes, "create", "read")
        run("clock", trial.clock, "create")
    finally:
        run("clean", trial.clean, "list")


class _Trial:
    """Each method is a step: it returns what it found, or raises the error that says what is wrong."""

    def __init__(self, client: Clients) -> None:
        self._client = client
        self._store = client()
        self._prefix = f"{PROBES}{uuid4().hex}/"

    @property
    def url(self) -> str:
        return self._store.url

    def reach(self) -> str:
        count = sum(1 for _ in self._store.list_after(self._prefix))
        if count:
            raise self._unsuitable(f"a prefix that nobody uses lists {count} keys")
        return f"{self._store.url} answers"

    def missing(self) -> str:
        self._expect_gone(self._store, self._key("missing"))
        return "what is not there is said to be missing"

    def create(self) -> str:
        key = self._key("first")
        if not self._store.put_if_absent(key, b"first"):
            held = self._store.get(key, limit=100)
            if held != b"first":
                raise self._unsuitable(f"{key} is new, and yet taken")
        return "an object can be created"

    def read(self) -> str:
        self._expect(self._store, self._key("first"), b"first")
        return "and is read back, whole and in part"

    def replace(self) -> str:
        key = self._key("first")
        self._store.put(key, b"other")
        self._expect(self._store, key, b"other")
        return "an object can be replaced"

    def delete(self) -> str:
        key = self._key("first")
        self._store.delete(key)
        self._expect_gone(self._store, key)
        self._store.delete(key)
        return "and deleted"

    def exclusive(self) -> str:
        require_put_if_absent(self._store)
        return "put-if-absent: of two writers one after the other, the first one stays"

    def race(self) -> str:
        meeting = threading.Barrier(_WRITERS)

        def meet() -> None:
            with suppress(threading.BrokenBarrierError):
                meeting.wait(_TOGETHER)

        clients = [self._client(hold=meet) for _ in range(_WRITERS)]
        told = []
        with ThreadPoolExecutor(_WRITERS) as threads:
            for keys, size in _RACES:
                began, raced, unknown = time.monotonic(), 0, 0
                while raced < keys and (raced < _RACED_AT_LEAST or time.monotonic() < began + _RACE_SECONDS):
                    unknown += self._race_for(self._key(f"race/{size}-{raced}"), clients, size, threads)
                    meeting.reset()
                    raced += 1
                told.append(f"{raced} of {_bytes(size)}" + (f", {unknown} answers lost" if unknown else ""))
        return f"put-if-absent: {_WRITERS} writers at the same moment, one winner: keys raced for: {'; '.join(told)}"

    def visible(self) -> str:
        other = self._client()
        for number in range(_ROUNDS):
            key = self._key(f"seen/{number}")
            self._expect_gone(other, key)  # also primes whatever remembers that a key was missing
            self._store.put_if_absent(key, b"first")
            self._expect(other, key, b"first")
            if self._keys(other, "seen/") != [key]:
                raise self._unsuitable(f"a listing lacks {key}, which has just been written")
            self._store.put(key, b"other")
            self._expect(other, key, b"other")
            self._store.delete(key)
            self._expect_gone(other, key)
            if self._keys(other, "seen/"):
                raise self._unsuitable(f"a listing has {key}, which has just been deleted")
        return f"what one client wrote, replaced and deleted, another saw at once, {_ROUNDS} times"

    def pages(self) -> str:
        keys = [
            self._key(f"page/{name}") for name in ("0", "1", "10", "2", "A", "a-b", "a.b", "b", "c/0", "c/1")
        ]
        for key in keys:
            self._store.put_if_absent(key, b"")
        keys.sort()
        for page, lister in (
            (1000, self._store),
            (_PAGE, self._client(page=_PAGE)),
            (1, self._client(page=1)),
        ):
            for after in ("", *keys):
                wanted = [key for key in keys if key > after]
                if self._keys(lister, "page/", after) != wanted:
                    raise self._unsuitable(
                        f"listing {page} keys a request after {after or 'the start'} does not give the rest in order",
                        hint="use a store that lists keys in ascending order, page by page, from StartAfter on",
                    )
        return f"listings are sorted, go on after any key, and have pages of {_PAGE} keys and of 1 as of 1000"

    def sizes(self) -> str:
        for size in _SIZES:
            key, data = self._key(f"size/{size}"), random.Random(size).randbytes(size)
            self._store.put_if_absent(key, data)
            self._expect(self._store, key, data)
            self._store.delete(key)
        return f"objects of {len(_SIZES)} sizes up to {_bytes(_SIZES[-1])} come back bit by bit"

    def clock(self) -> str:
        before = time.time()
        there = store_clock(self._store)
        after = time.time()
        ahead = there - (before + after) / 2
        apart = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
        found = f"the store's clock is {apart}, to within {(after - before) / 2 + 1:.1f} s"
        if abs(ahead) > _OFFSET:
            found += "; nothing depends on it, but set the one that is wrong: S3 refuses requests from 15 minutes on"
        return found

    def clean(self) -> str:
        for info in list(self._store.list_after(self._prefix)):
            self._store.delete(info.key)
        return "nothing is left behind"

    def _race_for(self, key: str, clients: Sequence[Store], size: int, threads: ThreadPoolExecutor) -> int:
        """How many were told neither yes nor no. Raises StoreUnsuitable unless one of the writers won, and no other."""
        bodies = [bytes([writer]) * size for writer in range(len(clients))]

        def write(writer: int) -> bool | None:
            try:
                return clients[writer].put_if_absent(key, bodies[writer])
            except StoreUnavailable:
                return None

        told = list(threads.map(write, range(len(clients))))
        held = self._store.get(key, limit=size)
        self._store.delete(key)
        won = [writer for writer, answer in enumerate(told) if answer]
        # One that was told no may be the one after all, where something below repeats requests: a publisher reads back.
        if len(won) > 1 or held not in ([bodies[w] for w in won] or bodies):
            raise self._unsuitable(
                f"put-if-absent does not hold: {len(won)} of {len(told)} writers of {key} at the same moment were told "
                f"that they created it, and the object that is there is {_whose(held, bodies, won)}",
                hint="two publishers could overwrite each other's versions: use a server whose PutObject with "
                "If-None-Match is atomic, or a POSIX directory",
            )
        return told.count(None)

    def _expect(self, store: Store, key: str, data: bytes) -> None:
        """Raises StoreUnsuitable unless `key` holds exactly `data`, read in every way."""
        try:
            info = store.head(key)
            held = store.get(key, limit=len(data) + 1)
            middle = len(data) // 2
            part = store.get_range(key, middle, len(data) - middle)
        except (ObjectMissing, CorruptObject) as error:
            raise self._unsuitable(f"{key} has just been written: {error.message}") from error
        if info is None or info.size != len(data) or held != data or part != data[middle:]:
            raise self._unsuitable(
                f"{key} has just been written with {len(data)} bytes, and is not read as that: head says "
                f"{'that it is missing' if info is None else f'{info.size} bytes'}, get gives {_same(held, data)}, "
                f"a ranged get {_same(part, data[middle:])}"
            )

    def _expect_gone(self, store: Store, key: str) -> None:
        """Raises StoreUnsuitable if there is something under `key`, which was never written or has been deleted."""
        if store.head(key) is not None:
            raise self._unsuitable(f"{key} is not there, and HEAD answers as if it was")
        try:
            store.get(key, limit=100)
        except ObjectMissing:
            return
        raise self._unsuitable(f"{key} is not there, and yet it can be read")

    def _keys(self, store: Store, under: str, after: str = "") -> list[str]:
        return [info.key for info in store.list_after(self._prefix + under, after)]

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _unsuitable(self, what: str, hint: str = _STALE) -> StoreUnsuitable:
        return StoreUnsuitable(f"{self._store.url}: {what}", hint=hint)


def _same(found: bytes, wanted: bytes) -> str:
    return "the same" if found == wanted else f"{len(found)} other bytes"


def _whose(held: bytes, bodies: Sequence[bytes], won: Sequence[int]) -> str:
    if held not in bodies:
        return "none of theirs"
    return "of one of these" if bodies.index(held) in won else "of another one"


def _bytes(count: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.0f} {name}"
    return f"{count} bytes"
