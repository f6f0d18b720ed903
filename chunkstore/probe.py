"""Whether a store really offers put-if-absent. Some servers accept the condition and ignore it."""

from uuid import uuid4

from chunkstore.errors import StoreUnsuitable
from chunkstore.store import Store


def require_put_if_absent(store: Store) -> None:
    """Put one fresh key twice with different bodies; return only if the first put won and its body stayed.

    Raises StoreUnsuitable if the store let the second one win or claim to, or refused the first; and any StoreError
    that one of the calls raises. Takes three small writes and one read, and leaves nothing behind.
    """
    key = f"probes/{uuid4().hex}"
    first, second = b"first " + key.encode(), b"second " + key.encode()
    try:
        outcomes = (store.put_if_absent(key, first), store.put_if_absent(key, second))
        held = store.get(key, limit=len(first) + len(second))
    finally:
        store.delete(key)
    if outcomes != (True, False) or held != first:
        raise StoreUnsuitable(
            f"{store.url}: put-if-absent does not hold: two writers of one key were told {outcomes}, "
            f"and {'the first' if held == first else 'not the first'} writer's bytes are kept",
            hint="publish to a store that honours If-None-Match on PutObject, or to a POSIX directory",
        )
