"""What `deltasync status` knows: one stream's log and subscribers, as far as the store tells."""

import heapq
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from pydantic import ValidationError

from chunkstore.errors import Action, DeltasyncError, LimitExceeded, ObjectMissing
from chunkstore.store import ObjectInfo, Store
from manifest.catalog import Catalog
from manifest.errors import ChainError
from manifest.history import History
from manifest.keys import SUBSCRIBERS, VERSIONS, parse_version_key
from manifest.lease import MAX_STATUS_BYTES, MISSED_RENEWALS
from manifest.log import VersionLog, open_stream, read_catalog
from manifest.plan import Plan
from manifest.schema import Manifest
from manifest.signing import Trust
from subscriber.status import RefusedVersion, SubscriberStatus

SHOWN_VERSIONS: Final = 10
_DOUBTED: Final = 100  # versions that are read to find one that is not refused
_AT_ONCE: Final = 8  # status objects that are read at a time


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version: sizes in bytes, `changed` of `elements`, `created_at` in Unix seconds by the publisher's clock.

    `alternate`: it is also stored as an anchor. `takeover`: it only opens the epoch of another publisher.
    """

    version: int
    kind: Literal["anchor", "delta", "reference"]
    base_version: int | None
    nbytes: int
    changed: int
    elements: int
    train_step: int | None
    epoch: int
    created_at: float
    alternate: bool
    takeover: bool


@dataclass(frozen=True, slots=True)
class SubscriberRow:
    """One subscriber. `lag_seconds`: age of the oldest version it lacks, None if that cannot be told.

    `silent_seconds`: since it last renewed its status; `silent`: that is too long for one that was not stopped. Both by
    the store's clock, and the time at which one looks, which is this machine's.
    """

    status: SubscriberStatus
    lag_versions: int
    lag_seconds: float | None
    silent_seconds: float
    silent: bool

    @property
    def faults(self) -> list[str]:
        """What is wrong with it, whatever its lag; nothing if it was stopped."""
        status, faults = self.status, []
        if status.state == "stopped":
            return []
        if self.silent:
            faults.append(f"has been silent for {self.silent_seconds:.0f} s")
        if status.state == "held":
            faults.append(f"serves nothing: {status.reason}")
        faults += [f"refuses version {r.version}: error[{r.kind}]: {r.message}" for r in status.refused]
        return faults

    def within(self, max_lag: int) -> bool:
        """Whether all is well, and it is at most `max_lag` versions behind; or it was stopped."""
        return self.status.state == "stopped" or (self.lag_versions <= max_lag and not self.faults)


@dataclass(frozen=True, slots=True)
class ColdStart:
    """What a new subscriber fetches: `nbytes` in `steps`, the first of which is `anchor` with `anchor_nbytes`.

    `reference`: the first step is the checkpoint that version 0 refers to, which it has to have.
    """

    anchor: int
    anchor_nbytes: int
    steps: int
    nbytes: int
    reference: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """One stream at one moment.

    `newest`: None while no version is committed. `tensors`, `elements`, `dense_bytes`: of the model, None if its
    catalog cannot be read. `cold_start`: None, with the reason in `chain_problem`, if there is no verified way.
    `anchors`: versions that are known to be stored whole. `versions`: the newest ones, newest first. `subscribers`:
    those with faults first, then those furthest behind, then those with an error. `refused`: versions that were looked
    at and are damaged or not trusted. `strays`: keys under versions/ that are none. `unreadable`: keys of status
    objects that do not parse, or are of another stream.
    """

    url: str
    stream: str
    newest: int | None
    epoch: int | None
    publisher: str | None
    tensors: int | None
    elements: int | None
    dense_bytes: int | None
    cold_start: ColdStart | None
    chain_problem: str | None
    anchors: tuple[int, ...]
    versions: tuple[VersionRow, ...]
    subscribers: tuple[SubscriberRow, ...]
    refused: tuple[RefusedVersion, ...]
    strays: tuple[str, ...]
    unreadable: tuple[str, ...]

    def problems(self, max_lag: int | None = None) -> list[str]:
        """All that somebody should look at, one sentence each; lag only beyond `max_lag` versions."""
        found = [f"version {r.version} is refused: error[{r.kind}]: {r.message}" for r in self.refused]
        if self.chain_problem is not None:
            found.append(f"a new subscriber cannot start: {self.chain_problem}")
        found += [f"{key} is no version: delete it" for key in self.strays]
        for row in self.subscribers:
            found += [f"{row.status.id} {fault}" for fault in row.faults]
            if max_lag is not None and not row.faults and not row.within(max_lag):
                found.append(f"{row.status.id} is {row.lag_versions} versions behind")
        return found + [f"{key} is no status object of this stream" for key in self.unreadable]

    def as_json(self) -> dict[str, Any]:
        """Plain values; each subscriber's status and lag in one object."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["cold_start"] = None if self.cold_start is None else asdict(self.cold_start)
        fields["versions"] = [asdict(row) for row in self.versions]
        fields["subscribers"] = [
            row.status.model_dump()
            | {name: getattr(row, name) for name in row.__slots__ if name != "status"}
            | {"faults": row.faults}
            for row in self.subscribers
        ]
        fields["refused"] = [refused.model_dump() for refused in self.refused]
        return fields


class _Reader:
    """Reads every version once, and remembers those that it may not use, `refused`.

    `committed`: when each listed version was, by the store's clock.
    """

    def __init__(self, log: VersionLog) -> None:
        self.log = log
        self.history = History(log)
        self.refused: dict[int, RefusedVersion] = {}
        listed = [(parse_version_key(info.key), info) for info in log.store.list_after(VERSIONS)]
        self.strays = tuple(info.key for version, info in listed if version is None)
        self.committed = {version: info.modified for version, info in listed if version is not None}

    def read(self, version: int) -> Manifest | None:
        """None if there is none, or it is refused."""
        if version in self.refused:
            return None
        try:
            return self.history.read(version)
        except DeltasyncError as error:
            if error.action is Action.RETRY:
                raise
            self.refused[version] = RefusedVersion(
                version=version, kind=error.kind, action=error.action.value, message=error.message[:4000]
            )
            return None

    def newest(self) -> Manifest | None:
        """The newest one that is not refused, of the newest versions."""
        newest = heapq.nlargest(_DOUBTED, self.committed)
        return next((manifest for version in newest if (manifest := self.read(version)) is not None), None)


def overview(store: Store, now: float, trust: Trust | None = None, shown: int = SHOWN_VERSIONS) -> Overview:
    """Look at the stream in `store`, and at its `shown` newest versions; `now` in Unix seconds.

    Raises ObjectMissing if there is no stream, StoreError, Untrusted if it is not the trusted stream.
    """
    log = VersionLog(store, open_stream(store, trust), trust=trust)
    reader = _Reader(log)
    newest = reader.newest()
    alternates = log.alternates()
    way, problem = (None, None) if newest is None else _cold_start(reader.history, newest)
    versions = () if newest is None else tuple(_versions(reader, newest, set(alternates), shown))
    rows, unreadable = _subscribers(reader, -1 if newest is None else newest.version, now)
    catalog, damage = (None, None) if newest is None else _catalog(store, newest)
    whole = {row.version for row in versions if row.kind == "anchor"} | set(alternates)
    if way is not None and way.steps[0].kind == "anchor":
        whole.add(way.steps[0].version)
    return Overview(
        url=store.url,
        stream=log.stream.id.hex(),
        newest=None if newest is None else newest.version,
        epoch=None if newest is None else newest.epoch,
        publisher=None if newest is None else newest.publisher.hex(),
        tensors=None if catalog is None else len(catalog.tensors),
        elements=None if catalog is None else sum(tensor.numel for tensor in catalog.tensors),
        dense_bytes=None if catalog is None else catalog.nbytes,
        cold_start=None if way is None else _summary(way),
        chain_problem=problem or damage,
        anchors=tuple(sorted(whole)),
        versions=versions,
        subscribers=rows,
        refused=tuple(reader.refused[version] for version in sorted(reader.refused)),
        strays=reader.strays,
        unreadable=unreadable,
    )


def _cold_start(history: History, newest: Manifest) -> tuple[Plan | None, str | None]:
    try:
        return history.plan(None, newest.version), None
    except ChainError as error:
        problem = error.message
    try:
        return history.plan(None, newest.version, references=True), None
    except ChainError:
        return None, problem


def _summary(way: Plan) -> ColdStart:
    first = way.steps[0]
    return ColdStart(first.version, first.nbytes, len(way.steps), way.nbytes, first.kind == "reference")


def _catalog(store: Store, newest: Manifest) -> tuple[Catalog | None, str | None]:
    try:
        return read_catalog(store, newest.catalog), None
    except DeltasyncError as error:
        if error.action is Action.RETRY:
            raise
        return None, error.message


def _versions(reader: _Reader, newest: Manifest, alternates: set[int], shown: int) -> Iterator[VersionRow]:
    for version in range(newest.version, max(-1, newest.version - shown), -1):
        manifest = reader.read(version)
        if manifest is not None:  # it may be refused, and the beginning of the log may have been trimmed
            yield VersionRow(
                version=version,
                kind=manifest.kind,
                base_version=manifest.base_version,
                nbytes=manifest.nbytes,
                changed=manifest.stats.changed,
                elements=manifest.stats.elements,
                train_step=manifest.train_step,
                epoch=manifest.epoch,
                created_at=manifest.created_at,
                alternate=version in alternates,
                takeover=manifest.kind == "delta" and not manifest.chunks,
            )


def _subscribers(
    reader: _Reader, newest: int, now: float
) -> tuple[tuple[SubscriberRow, ...], tuple[str, ...]]:
    store, stream = reader.log.store, reader.log.stream.id.hex()
    infos = list(store.list_after(SUBSCRIBERS))
    now = max([now, *(info.modified for info in infos)])  # if this machine's clock is behind the store's
    rows, unreadable = [], []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for info, data in zip(infos, pool.map(lambda info: _data(store, info), infos), strict=True):
            if data is None:
                continue  # removed since it was listed
            try:
                status = SubscriberStatus.model_validate_json(data)
            except ValidationError:
                unreadable.append(info.key)
                continue
            if status.stream in ("", stream):
                rows.append(_subscriber(reader, status, info, newest, now))
            else:
                unreadable.append(info.key)
    rows.sort(key=_urgency)
    return tuple(rows), tuple(unreadable)


def _urgency(row: SubscriberRow) -> tuple[object, ...]:
    """Orders those that need a look before the others."""
    status = row.status
    return not row.faults, status.state == "stopped", -row.lag_versions, status.last_error is None, status.id


def _data(store: Store, info: ObjectInfo) -> bytes | None:
    try:
        return store.get(info.key, limit=MAX_STATUS_BYTES)
    except ObjectMissing:
        return None
    except LimitExceeded:
        return b"too large to be a status"


def _subscriber(
    reader: _Reader, status: SubscriberStatus, info: ObjectInfo, newest: int, now: float
) -> SubscriberRow:
    applied = -1 if status.applied_version is None else status.applied_version
    lag = max(0, newest - applied)
    missed = reader.committed.get(applied + 1)
    silent = max(0.0, now - info.modified)
    return SubscriberRow(
        status=status,
        lag_versions=lag,
        lag_seconds=0.0 if lag == 0 else None if missed is None else max(0.0, now - missed),
        silent_seconds=silent,
        silent=status.state != "stopped" and silent > MISSED_RENEWALS * status.renew_seconds,
    )
