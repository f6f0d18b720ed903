"""What a fault proxy's record says of objects that are created once: what happened, and what each client could know."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.support.fault_proxy import Exchange, Fault


@dataclass(frozen=True)
class History:
    """The exchanges about one key, in the order of arrival."""

    key: str
    exchanges: Sequence[Exchange]

    @property
    def created(self) -> list[str]:
        """The hash of each body that the server said it created the object with: one, or the store is broken."""
        return [
            one.sent
            for one in self.exchanges
            if one.method == "PUT" and one.conditional
            for status in one.answers
            if status == 200
        ]

    def of(self, client: str, until: float = math.inf) -> "History":
        """What `client` exchanged from its first offer on, as far as it was told by the time `until`."""
        mine = [one for one in self.exchanges if one.client == client]
        first = next((i for i, one in enumerate(mine) if one.method == "PUT"), len(mine))
        return History(self.key, [one for one in mine[first:] if one.at <= until or math.isinf(one.at)])

    @property
    def offered(self) -> set[str]:
        return {one.sent for one in self.exchanges if one.method == "PUT"}

    @property
    def known(self) -> list[str | None]:
        """Per exchange, the hash of what the key is thereby known to hold; None where it told nothing for certain.

        A whole, true 200 to an offer says so; likewise one to a read. 412 does not: it may answer one's own offer.
        """
        return [_learned(one) for one in self.exchanges]

    @property
    def perhaps(self) -> bool:
        """Whether one may have told its client even so: the 200 to an offer, cut off after its status line."""
        return any(
            one.method == "PUT" and one.fault is Fault.CUT_REPLY and one.answers == [200]
            for one in self.exchanges
        )


def _learned(one: Exchange) -> str | None:
    if not one.honest or one.answers[-1] != 200:
        return None
    return one.sent if one.method == "PUT" else one.held


def histories(record: Iterable[Exchange], part: str) -> dict[str, History]:
    """By key, of all keys that begin with `part`, wherever in the path that is."""
    found: dict[str, list[Exchange]] = {}
    for one in record:
        _, separator, name = one.path.partition(f"/{part}")
        if separator and name:
            found.setdefault(part + name, []).append(one)
    return {key: History(key, exchanges) for key, exchanges in found.items()}


def summary(record: Iterable[Exchange]) -> str:
    """How many requests met which fault."""
    counts = Counter(one.fault.name for one in record)
    return f"{sum(counts.values())} requests: " + ", ".join(f"{n} {name}" for name, n in counts.most_common())
