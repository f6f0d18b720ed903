"""What a store does, found out by trying: whether it really offers put-if-absent, and what time it is there."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final
from uuid import uuid4

from chunkstore.crashpoints import crash_point
from chunkstore.errors import StoreError, StoreUnavailable, StoreUnsuitable
from chunkstore.retry import Backoff, repeated
from chunkstore.store import Store

PROBES: Final = "probes/"
"""Where probes lie until they are removed, which one that was interrupted is not."""

_BACKOFF: Final = Backoff(deadline=30.0)


def require_put_if_absent(store: Store, backoff: Backoff | None = None) -> None:
    """Put one fresh key twice with different bodies; return only if the first put won and its body stayed.

    Raises StoreUnsuitable if the store let the second one win or claim to, or kept neither; and any StoreError that one
    of the calls raises: StoreUnavailable only after other keys were tried until the deadline of `backoff`. Takes three
    small writes and one read, and leaves nothing behind.
    """
    repeated(lambda: _put_twice(store), backoff or _BACKOFF)


def store_clock(store: Store, backoff: Backoff | None = None) -> float:
    """Now, in Unix seconds, by the clock that dates the store's objects: of an object that is put, and removed again.

    Raises StoreUnsuitable if the store forgets it, or any StoreError, StoreUnavailable as `require_put_if_absent`.
    """
    return repeated(lambda: _date_of_new(store), backoff or _BACKOFF)


@contextmanager
def probe_key(store: Store) -> Iterator[str]:
    """A fresh key, whose object is removed afterwards; a failure of that hides none of what went before."""
    key = f"{PROBES}{uuid4().hex}"
    try:
        yield key
    except BaseException:  # also Ctrl-C: a probe is nobody's object
        with suppress(StoreError):
            store.delete(key)
        raise
    crash_point("probe.before_delete")
    store.delete(key)


def _put_twice(store: Store) -> None:
    with probe_key(store) as key:
        first, second = b"first " + key.encode(), b"second " + key.encode()
        outcomes = (store.put_if_absent(key, first), store.put_if_absent(key, second))
        held = store.get(key, limit=len(first) + len(second))
    if outcomes == (False, False) and held == first:
        # Told that its own fresh key is taken: on the way to the server somebody repeated the request.
        raise StoreUnavailable(f"put_if_absent {store.url}/{key}: created, and yet refused")
    if outcomes != (True, False) or held != first:
        raise StoreUnsuitable(
            f"{store.url}: put-if-absent does not hold: two writers of one key were told {outcomes}, "
            f"and {'the first' if held == first else 'not the first'} writer's bytes are kept",
            hint="publish to a store that honours If-None-Match on PutObject, or to a POSIX directory",
        )


def _date_of_new(store: Store) -> float:
    with probe_key(store) as key:
        store.put_if_absent(key, b"")  # as all probes are written, so one permission does
        info = store.head(key)
    if info is None:
        raise StoreUnsuitable(
            f"{store.url}/{key} was written and is not there", hint="use a store with read-after-write"
        )
    return info.modified
