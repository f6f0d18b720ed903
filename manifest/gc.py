"""Garbage collection: what of a stream nobody needs any more, a pure function of what the store holds.

Everything from one version on is kept, the *floor*: a whole version, all there, from which every later one can be
reached. It is the newest of those that are older than the grace period and not above any version that a lease, the
grace period or the policy asks for. Manifests are never garbage: they are small, and a key that was deleted could be
written again by a writer that was asleep.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chunkstore.probe import PROBES
from chunkstore.store import ObjectInfo
from manifest.keys import CHUNKS, SUBSCRIBERS, parse_attempt_key
from manifest.lease import Lease

FORGOTTEN: Final = 30 * 86400.0
"""Seconds without a word after which a subscriber's status object goes."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`grace`: seconds for which everything is kept; longer than any upload, compaction or catch-up takes.

    `keep`: so many of the newest versions stay restorable, at least 1.
    """

    grace: float
    keep: int = 1


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way in which a version is stored: what it builds on (None: whole), its attempt (hex), its chunks' sizes.

    `written`: when its manifest was, in Unix seconds by the store's clock.
    """

    base: int | None
    attempt: str
    chunks: Mapping[str, int]
    written: float


@dataclass(frozen=True, slots=True)
class Bound:
    """Versions from `version` on have to stay reachable, and why."""

    version: int
    why: str


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a store holds of one stream. Times in Unix seconds by the store's clock, as is `now`.

    `committed`: when each version was. `versions`: of those, the newest ones without a gap whose links readers accept,
    as far back as was read, and their `alternates`. `obscure`: those with an alternate that this release cannot read.
    `objects`: everything under chunks/, parts/, attempts/, probes/ and subscribers/; listed after the log was.
    """

    now: float
    committed: Mapping[int, float]
    versions: Mapping[int, Encoding]
    alternates: Mapping[int, Encoding]
    obscure: Collection[int]
    objects: Sequence[ObjectInfo]
    temporaries: Sequence[ObjectInfo]
    leases: Sequence[Lease]


class Reason(StrEnum):
    SUPERSEDED = "superseded"  # below the floor
    ORPHAN = "orphan"  # of an attempt that its version did not become
    PROBE = "probe"
    STATUS = "status"  # of a subscriber that has been silent for a month
    TEMPORARY = "temporary"  # half-written


@dataclass(frozen=True, slots=True)
class Doomed:
    """An object that may go: its key, or a temporary's name, and its size in bytes."""

    key: str
    nbytes: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Garbage:
    """`floor`: everything from this version on is kept; None if no version may go. `bound`: what keeps it that low."""

    objects: tuple[Doomed, ...]
    floor: int | None
    bound: Bound | None

    @property
    def nbytes(self) -> int:
        return sum(doomed.nbytes for doomed in self.objects)


def collectable(held: Holdings, policy: Policy) -> Garbage:
    """What may be deleted, in key order."""
    bound = lowest_needed(held.committed, held.leases, policy, held.now)
    floor = None if bound is None else find_floor(held, policy, bound)
    doomed = [*_of_attempts(held, policy, floor), *_of_nobody(held, policy)]
    return Garbage(tuple(sorted(doomed, key=lambda one: one.key)), floor, bound)


def lowest_needed(
    committed: Mapping[int, float], leases: Sequence[Lease], policy: Policy, now: float
) -> Bound | None:
    """The lowest version that somebody may still ask for; None if there is no version."""
    if not committed:
        return None
    newest = max(committed)
    kept = "it is the newest" if policy.keep == 1 else f"the newest {policy.keep} are kept"
    bounds = [Bound(max(0, newest - policy.keep + 1), kept)]
    young = min((v for v, written in committed.items() if now - written <= policy.grace), default=None)
    if young is not None:
        bounds.append(Bound(young, "it is younger than the grace period"))
    bounds += [
        Bound(lease.needs, f"subscriber {lease.id} needs it")
        for lease in leases
        if lease.needs is not None and lease.live(now, policy.grace)
    ]
    return min(bounds, key=lambda bound: bound.version)


def find_floor(held: Holdings, policy: Policy, bound: Bound) -> int | None:
    """The newest version up to `bound` that is whole, settled, and leads to every later one; None: none that was read.

    Settled: older than the grace period. Readers that have begun on an older path are done, or hold a lease.
    """
    there = {info.key: info.size for info in held.objects}

    def complete(encoding: Encoding | None) -> bool:
        return encoding is not None and all(
            there.get(key) == nbytes for key, nbytes in encoding.chunks.items()
        )

    whole, settled = set(), set()
    bases: dict[int, int] = {}  # of the deltas that are complete
    for version, own in held.versions.items():
        for encoding in (own, held.alternates.get(version)):
            if encoding is None or not complete(encoding):
                continue
            if encoding.base is not None:
                bases[version] = encoding.base
                continue
            whole.add(version)
            if held.now - encoding.written > policy.grace:
                settled.add(version)
    for version in sorted(settled, reverse=True):
        if version <= bound.version and _leads_everywhere(version, held.versions, whole, bases):
            return version
    return None


def _leads_everywhere(
    start: int, versions: Collection[int], whole: Collection[int], bases: Mapping[int, int]
) -> bool:
    reached = {start}
    for version in sorted(version for version in versions if version > start):
        if version not in whole and bases.get(version) not in reached:
            return False
        reached.add(version)
    return True


def _of_attempts(held: Holdings, policy: Policy, floor: int | None) -> Iterator[Doomed]:
    """Objects of attempts at versions that are decided. One attempt is as young as its youngest object."""
    attempts: defaultdict[tuple[int, str], list[ObjectInfo]] = defaultdict(list)
    for info in held.objects:
        key = parse_attempt_key(info.key)
        if key is not None:
            attempts[key].append(info)
    for (version, attempt), infos in attempts.items():
        if version not in held.committed or held.now - max(i.modified for i in infos) <= policy.grace:
            continue
        if floor is not None and version < floor:
            yield from (Doomed(info.key, info.size, Reason.SUPERSEDED) for info in infos)
        elif version in held.versions and version not in held.obscure:
            both = (held.versions[version], held.alternates.get(version))
            named = any(encoding is not None and encoding.attempt == attempt for encoding in both)
            yield from (
                Doomed(info.key, info.size, Reason.ORPHAN)
                for info in infos
                if not (named and info.key.startswith(CHUNKS))
            )


def _of_nobody(held: Holdings, policy: Policy) -> Iterator[Doomed]:
    for info in held.objects:
        age = held.now - info.modified
        if info.key.startswith(PROBES) and age > policy.grace:
            yield Doomed(info.key, info.size, Reason.PROBE)
        elif info.key.startswith(SUBSCRIBERS) and age > max(policy.grace, FORGOTTEN):
            yield Doomed(info.key, info.size, Reason.STATUS)
    for info in held.temporaries:
        if held.now - info.modified > policy.grace:
            yield Doomed(info.key, info.size, Reason.TEMPORARY)
