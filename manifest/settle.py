"""Put one object once and learn for certain what its key holds, even when replies are lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from chunkstore.errors import (
    AccessDenied,
    CorruptObject,
    DeltasyncError,
    InvalidKey,
    LimitExceeded,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from chunkstore.store import Store
from manifest.errors import CommitUnknown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to insist on an answer, in seconds, and by which clock."""

    deadline: float = 60.0
    first_delay: float = 0.1
    longest_delay: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


def settle(
    store: Store, key: str, data: bytes, *, limit: int, patience: Patience, may_land: bool = False
) -> bytes:
    """Create `key` with `data` unless it exists; return the bytes the key holds: `data` itself, or another's.

    A reply that is lost, or a refusal that may answer one's own earlier try, is settled by reading the key
    back: bytes there decide; nothing there means the same bytes are put again. Where the store denies the
    call outright and no earlier try can still land, its error is passed on. `may_land`: an earlier call for the same
    bytes ended as CommitUnknown. Raises CommitUnknown if nothing is known at the deadline; LimitExceeded if `data`, or
    what another wrote, is larger than `limit` bytes.
    """
    if len(data) > limit:
        raise LimitExceeded(f"{store.url}/{key} would have {len(data)} bytes, the limit is {limit}")
    give_up = patience.clock() + patience.deadline
    delay = patience.first_delay
    while True:
        offer = _offer(store, key, data)
        if offer.created:
            return data
        may_land = may_land or offer.may_land  # a try whose reply was lost may still take effect
        problem = offer.problem
        try:
            return store.get(key, limit=limit)
        except ObjectMissing:
            if problem is not None and not may_land:
                raise problem from None
        except (StoreError, CorruptObject) as error:
            if not may_land and not isinstance(error, StoreUnavailable | AccessDenied | CorruptObject):
                raise
            problem = problem or error
        if patience.clock() >= give_up:
            raise CommitUnknown(
                f"unknown whether {store.url}/{key} was written: {problem or 'the key comes and goes'}",
                hint="keep the chunks and put the same bytes again; never other bytes under this version",
            ) from problem
        patience.sleep(delay)
        delay = min(2 * delay, patience.longest_delay)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one put told: the key was created by it; or why not; and whether it may still take effect."""

    created: bool = False
    problem: DeltasyncError | None = None
    may_land: bool = False


def _offer(store: Store, key: str, data: bytes) -> _Offer:
    try:
        return _Offer(created=store.put_if_absent(key, data))
    except (AccessDenied, StoreFull, StoreUnsuitable, InvalidKey) as error:
        return _Offer(problem=error)  # refused outright
    except DeltasyncError as error:
        return _Offer(problem=error, may_land=True)


def wait_for(look: Callable[[], T | None], patience: Patience) -> T | None:
    """What `look` finds as soon as it finds something; None at the deadline. Looks at least once."""
    give_up = patience.clock() + patience.deadline
    delay = patience.first_delay
    while (found := look()) is None:
        left = give_up - patience.clock()
        if left <= 0:
            return None
        patience.sleep(min(delay, left))
        delay = min(2 * delay, patience.longest_delay)
    return found
