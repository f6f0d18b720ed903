"""What a store does, found out by trying: whether it really offers put-if-absent, and what time it is there."""

from typing import Final
from uuid import uuid4

from chunkstore.crashpoints import crash_point
from chunkstore.errors import StoreUnsuitable
from chunkstore.store import Store

PROBES: Final = "probes/"
"""Where probes lie until they are removed, which one that was interrupted is not."""


def require_put_if_absent(store: Store) -> None:
    """Put one fresh key twice with different bodies; return only if the first put won and its body stayed.

    Raises StoreUnsuitable if the store let the second one win or claim to, or refused the first; and any StoreError
    that one of the calls raises. Takes three small writes and one read, and leaves nothing behind.
    """
    key = f"{PROBES}{uuid4().hex}"
    first, second = b"first " + key.encode(), b"second " + key.encode()
    try:
        outcomes = (store.put_if_absent(key, first), store.put_if_absent(key, second))
        held = store.get(key, limit=len(first) + len(second))
        crash_point("probe.before_delete")
    finally:
        store.delete(key)
    if outcomes != (True, False) or held != first:
        raise StoreUnsuitable(
            f"{store.url}: put-if-absent does not hold: two writers of one key were told {outcomes}, "
            f"and {'the first' if held == first else 'not the first'} writer's bytes are kept",
            hint="publish to a store that honours If-None-Match on PutObject, or to a POSIX directory",
        )


def store_clock(store: Store) -> float:
    """Now, in Unix seconds, by the clock that dates the store's objects: of an object that is put, and removed again.

    Raises StoreUnsuitable if the store forgets it, or any StoreError.
    """
    key = f"{PROBES}{uuid4().hex}"
    try:
        store.put_if_absent(key, b"")  # as all probes are written, so one permission does
        info = store.head(key)
        crash_point("probe.before_delete")
    finally:
        store.delete(key)
    if info is None:
        raise StoreUnsuitable(
            f"{store.url}/{key} was written and is not there", hint="use a store with read-after-write"
        )
    return info.modified
