"""The truth beside the store, and the invariants of DESIGN §3 that everything done to the store is held against.

1. *Visible means durable.* What a manifest names is there when it appears, with the promised length and hash. (Of an
   alternate whose writer slept for longer than the grace period it may be gone; then everybody goes around it.)
2. *One history.* Versions come without gaps, each once; nothing that was written is written again or replaced, and no
   manifest is ever deleted. Each names its parent; the epoch never goes down, and a higher one begins with an empty
   version: so whoever has been overtaken commits nothing (fencing). Version numbers go up even if training goes back.
3. *Nothing is lost, nothing twice.* A version is bit for bit what its trainer held when it published, told apart by the
   train step alone; changes of attempts that failed are in the next one.
4. *A subscriber is what it says.* While an engine serves version v its live bits are those of v; its status object
   never says anything else; what it serves never goes down within one life.
5. *Nothing half applied is served*: the same, looked at after every step, in the middle of an apply too.
6. *Restorable.* The newest version can be rebuilt from the store alone, after every commit and every deletion.
7. *Retention.* Garbage collection deletes nothing younger than the grace period, nothing of an undecided version, and
   nothing from the version on that a live lease, the policy or the grace period asks for: that one stays restorable.
   In the end, all that nobody needs can go.
8. *The truth is told.* Who is told "committed" has been; who is told "failed" never is, except by CommitUnknown;
   who is told "nothing changed" holds the newest version's weights; who is told "fenced" was.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import blake3
import numpy as np

from chunkstore.dtypes import Bits, bits_dtype
from chunkstore.errors import DeltasyncError
from chunkstore.memory import MemoryStore
from chunkstore.store import ObjectInfo
from manifest.catalog import Catalog
from manifest.errors import CommitUnknown, Fenced
from manifest.gc import Policy
from manifest.image import Image
from manifest.keys import (
    ALTERNATES,
    SUBSCRIBERS,
    VERSIONS,
    parse_alternate_key,
    parse_attempt_key,
    parse_version_key,
)
from manifest.log import StreamInfo, VersionLog, open_stream
from manifest.rebuild import rebuild
from manifest.schema import Manifest
from publisher.commit import Commit
from tests.machine.sim import Process, Sim

Weights = Mapping[str, Bits]


@dataclass(frozen=True)
class Version:
    """What was committed, by whom, and what it has to be."""

    process: Process
    manifest: Manifest
    weights: Weights
    at: float


@dataclass
class Collection:
    """One garbage collection, and what it has seen: when it asked for the time, which leases were live then and what
    they asked for, which version was the newest.
    """

    policy: Policy
    began: float = 0.0
    live: set[str] = field(default_factory=set)
    leases: dict[str, int] = field(default_factory=dict)
    newest: int | None = None


@dataclass
class Ledger:
    """`published`: what each train step published. `first`: what the trainer of a process held when it started."""

    sim: Sim
    store: MemoryStore
    counts: Counter[str]
    catalog: Catalog
    published: dict[int, Weights] = field(default_factory=dict)
    first: dict[Process, Weights] = field(default_factory=dict)
    versions: list[Version] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    collections: dict[Process, Collection] = field(default_factory=dict)
    serving: dict[str, Callable[[], list[int]]] = field(
        default_factory=dict
    )  # by status key: what it may say

    @property
    def newest(self) -> int:
        return len(self.versions) - 1

    # What is done to the store.

    def said(self, key: str, data: bytes) -> None:
        """A process is about to write `data`; which may come late, when it is no longer true."""
        if key.startswith(SUBSCRIBERS):
            self._status(key, json.loads(data))

    def written(self, process: Process, key: str, data: bytes, before: bytes | None) -> None:
        if process in self.collections:
            self._begin(self.collections[process])
        if key.startswith(SUBSCRIBERS):
            return
        assert before in (None, data), f"2: {process.name} overwrites {key}"
        version = parse_version_key(key)
        if version is not None:
            self._committed(process, version, Manifest.from_bytes(data, name=key))
        elif (version := parse_alternate_key(key)) is not None:
            self._stored_whole(version, Manifest.from_bytes(data, name=key))

    def deleted(self, process: Process, info: ObjectInfo) -> None:
        key, collection = info.key, self.collections.get(process)
        assert not key.startswith((VERSIONS, ALTERNATES)), f"2: {process.name} deletes {key}"
        attempt = parse_attempt_key(key)
        if attempt is None:
            return
        self.counts["gc deletions"] += 1
        assert collection is not None, f"7: {process.name}, which is no garbage collection, deletes {key}"
        if self._may_go(info, attempt[0], collection):
            self.check_restorable(self.newest)
            self.check_restorable(self._needed(collection))

    def read(self, process: Process, key: str) -> None:
        collection = self.collections.get(process)
        if collection is None:
            return
        if key in collection.live:
            needs = json.loads(self.store.get(key, limit=1 << 20))["needs_version"]
            if needs is not None:
                collection.leases[key] = needs
        version = parse_version_key(key)
        if version is not None and collection.newest is None:
            collection.newest = version

    def _begin(self, collection: Collection) -> None:
        collection.began = self.sim.now
        for info in self.store.list_after(SUBSCRIBERS):
            status = json.loads(self.store.get(info.key, limit=info.size))
            if self.sim.now - info.modified <= max(collection.policy.grace, 3 * status["renew_seconds"]):
                collection.live.add(info.key)

    def _committed(self, process: Process, version: int, manifest: Manifest) -> None:
        assert version == len(self.versions), f"2: version {version} after {self.newest}"
        assert manifest.version == version
        parent = self.versions[-1].manifest if self.versions else None
        takeover = parent is not None and manifest.epoch > parent.epoch
        if parent is not None:
            assert manifest.parent_hash == parent.hash, f"2: {version} has another parent"
            assert manifest.epoch >= parent.epoch, f"2: {version} is of an epoch that is over"
            assert takeover or manifest.publisher == parent.publisher, (
                f"2: two publishers of {version}'s epoch"
            )
            assert not takeover or not manifest.chunks, f"2: a takeover, {version}, has chunks"
        self._check_objects(manifest)
        step = manifest.train_step
        if takeover:
            weights = self.versions[-1].weights
            self.counts["takeovers"] += 1
        elif version == 0:
            weights = self.first[process]
        else:
            assert step in self.published, f"3: {version} is of train step {step}, which nobody published"
            assert step not in self.failed, f"8: step {step} is {version}, told: {self.failed.get(step)}"
            weights = self.published[step]
        self.counts["commits"] += 1
        self.versions.append(Version(process, manifest, weights, self.sim.now))
        self.check_restorable(version)

    def _stored_whole(self, version: int, alternate: Manifest) -> None:
        own = self.versions[version]
        assert alternate.kind == "anchor"
        assert alternate.digests == own.manifest.digests, f"6: another version is stored as {version}"
        self.counts["alternates"] += 1
        if any(self.store.head(ref.key) is None for ref in alternate.chunks):
            # Its writer slept, or the write came, after garbage collection had taken it for left behind.
            self.counts["alternates of what is gone"] += 1
            self.check_restorable(self.newest)
            return
        self._check_objects(alternate)
        image = self._image()
        image.apply(self.store, alternate)
        self._check_bits(image, version)

    def _check_objects(self, manifest: Manifest) -> None:
        for ref in manifest.chunks:
            info = self.store.head(ref.key)
            assert info is not None, f"1: {ref.key} of version {manifest.version} is missing"
            data = self.store.get(ref.key, limit=info.size)
            promised = (ref.nbytes, ref.hash)
            assert (len(data), blake3.blake3(data).digest()) == promised, f"1: {ref.key} is something else"

    # What must always be possible.

    def log(self) -> VersionLog:
        return VersionLog(self.store, StreamInfo(open_stream(self.store).id))

    def check_restorable(self, version: int) -> None:
        """A subscriber that starts cold gets to `version`, with its bits."""
        image = self._image()
        try:
            rebuild(self.log(), version, image)
        except DeltasyncError as error:
            raise AssertionError(
                f"6: version {version} of {self.newest} cannot be restored: {error}"
            ) from error
        self._check_bits(image, version)

    def _image(self) -> Image:
        arrays = [np.zeros(spec.numel, bits_dtype(spec.dtype)) for spec in self.catalog.tensors]
        return Image(self.catalog, arrays)

    def _check_bits(self, image: Image, version: int) -> None:
        held = {spec.name: bits for spec, bits in zip(self.catalog.tensors, image.arrays, strict=True)}
        wrong = differing(held, self.versions[version].weights)
        assert not wrong, f"3: version {version} is not what its trainer held: {wrong}"

    def _may_go(self, info: ObjectInfo, version: int, collection: Collection) -> bool:
        """Whether what goes is part of a version."""
        key, grace = info.key, collection.policy.grace
        assert version <= self.newest, f"7: {key} is of a version that is not decided"
        assert self.sim.now - info.modified > grace, f"7: {key} is younger than the grace period"
        needed, named = self._needed(collection), key in self.named(version)
        assert version < needed or not named, f"7: {key} goes, and versions from {needed} on are needed"
        return named

    def named(self, version: int) -> set[str]:
        """Chunks of a version, in both its encodings."""
        alternate = self.log().read_alternate(version)
        both = (self.versions[version].manifest, alternate)
        return {ref.key for manifest in both if manifest is not None for ref in manifest.chunks}

    def _needed(self, collection: Collection) -> int:
        """The version from which on everything has to stay, by the rules of the policy alone."""
        policy, newest = collection.policy, collection.newest
        assert newest is not None
        young = [v for v, one in enumerate(self.versions) if collection.began - one.at <= policy.grace]
        return min([max(0, newest - policy.keep + 1), *young, *collection.leases.values()])

    # What people and processes are told.

    def _status(self, key: str, status: Mapping[str, object]) -> None:
        if status["state"] == "serving":
            served = self.serving[key]()
            version = status["applied_version"]
            assert version in served, f"4: {key} says {version}, it has served {served} since it said so last"
        refused = status["refused"]
        assert isinstance(refused, list)
        self.counts["refused versions"] += bool(refused)

    def told(
        self, process: Process, step: int, base: int, commit: Commit | None, error: BaseException | None
    ) -> None:
        """The outcome that `process` learns of publishing train step `step` on top of version `base`."""
        found = [
            one.manifest for one in self.versions if one.manifest.train_step == step and one.manifest.chunks
        ]
        if isinstance(error, CommitUnknown):
            self.counts["commit unknown"] += 1
        elif error is not None:
            assert not found, f"8: step {step} is version {found[0].version}, told: {error!r}"
            self.failed[step] = repr(error)
            kind = error.kind if isinstance(error, DeltasyncError) else type(error).__name__
            self.counts[f"told {kind}"] += 1
            if isinstance(error, Fenced):
                others = [one for one in self.versions[base + 1 :] if one.process is not process]
                assert others, f"8: {process.name} is fenced at {base} by nobody"
        elif commit is None:
            wrong = differing(self.versions[base].weights, self.published[step])
            assert not wrong, f"8: told that nothing has changed since {base}, but {wrong}"
            self.counts["told unchanged"] += 1
        else:
            assert found or commit.version == base, (
                f"8: step {step} is no version, told to be {commit.version}"
            )
            own = self.versions[commit.version]
            assert own.manifest.hash == commit.manifest.hash, f"8: step {step} told to be {commit.version}"
            wrong = differing(own.weights, self.published[step])
            assert not wrong, f"8: step {step} told to be {commit.version}, which differs: {wrong}"
            self.counts["told committed"] += 1


def differing(held: Weights, wanted: Weights) -> list[str]:
    """Names of tensors whose bits differ."""
    return [
        name for name, bits in wanted.items() if not np.array_equal(held[name].reshape(-1), bits.reshape(-1))
    ]
