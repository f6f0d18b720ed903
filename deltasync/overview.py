"""What `deltasync status` knows: one stream's log and subscribers, as far as the store tells."""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from pydantic import ValidationError

from chunkstore.errors import FormatUnsupported, LimitExceeded, ObjectMissing
from chunkstore.store import Store
from manifest.errors import ChainError, ManifestInvalid
from manifest.history import find_plan
from manifest.keys import SUBSCRIBERS
from manifest.lease import MAX_STATUS_BYTES, MISSED_RENEWALS
from manifest.log import VersionLog, open_stream, read_catalog
from manifest.schema import Manifest
from manifest.signing import Trust
from subscriber.status import RefusedVersion, SubscriberStatus

SHOWN_VERSIONS: Final = 10
_DOUBTED: Final = 100  # versions that are read to find one that is not refused


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version: sizes in bytes, `created_at` in Unix seconds, `alternate`: it is also stored as an anchor."""

    version: int
    kind: Literal["anchor", "delta", "reference"]
    base_version: int | None
    nbytes: int
    changed: int
    train_step: int | None
    epoch: int
    created_at: float
    alternate: bool


@dataclass(frozen=True, slots=True)
class SubscriberRow:
    """One subscriber. `lag_seconds`: age of the oldest version it lacks, None if that cannot be told.

    `silent_seconds`: since it last renewed its status; `silent`: that is too long for one that was not stopped.
    """

    status: SubscriberStatus
    lag_versions: int
    lag_seconds: float | None
    silent_seconds: float
    silent: bool

    def within(self, max_lag: int) -> bool:
        """Whether all is well: at most `max_lag` versions behind, nothing refused, not silent; or stopped."""
        if self.status.state == "stopped":
            return True
        return self.lag_versions <= max_lag and not self.status.refused and not self.silent


@dataclass(frozen=True, slots=True)
class Overview:
    """One stream at one moment.

    `newest`: None while no version is committed; then the sizes are 0. `cold_start_*`: what a new subscriber fetches;
    None, with the reason in `chain_problem`, if there is no verified way. `versions`: the newest ones, ascending.
    `refused`: versions that were looked at and are damaged or not trusted. `unreadable`: keys of status objects that do
    not parse.
    """

    url: str
    stream: str
    newest: int | None
    epoch: int | None
    publisher: str | None
    tensors: int
    elements: int
    dense_bytes: int
    cold_start_bytes: int | None
    cold_start_steps: int | None
    cold_start_anchor: int | None
    chain_problem: str | None
    versions: tuple[VersionRow, ...]
    subscribers: tuple[SubscriberRow, ...]
    refused: tuple[RefusedVersion, ...]
    unreadable: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values; each subscriber's status and lag in one object."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["versions"] = [asdict(row) for row in self.versions]
        fields["subscribers"] = [
            row.status.model_dump() | {name: getattr(row, name) for name in row.__slots__ if name != "status"}
            for row in self.subscribers
        ]
        fields["refused"] = [refused.model_dump() for refused in self.refused]
        return fields


class _Reader:
    """Reads versions and remembers those that it may not use, `refused`."""

    def __init__(self, log: VersionLog) -> None:
        self.log = log
        self.refused: dict[int, RefusedVersion] = {}

    def read(self, version: int) -> Manifest | None:
        """None if there is none, or it is refused."""
        try:
            return self.log.read(version)
        except (ManifestInvalid, FormatUnsupported) as error:
            self.refused[version] = RefusedVersion(
                version=version, kind=error.kind, message=error.message[:4000]
            )
            return None

    def newest(self) -> Manifest | None:
        """The newest one that is not refused, of the newest versions."""
        newest = heapq.nlargest(_DOUBTED, self.log.versions())
        return next((manifest for version in newest if (manifest := self.read(version)) is not None), None)


def overview(store: Store, now: float, trust: Trust | None = None) -> Overview:
    """Look at the stream in `store`; `now` in Unix seconds. Raises ObjectMissing if there is none, StoreError,
    Untrusted if it is not the trusted stream."""
    log = VersionLog(store, open_stream(store, trust), trust=trust)
    reader = _Reader(log)
    newest = reader.newest()
    rows, unreadable = _subscribers(reader, -1 if newest is None else newest.version, now)
    if newest is None:
        return Overview(
            store.url,
            log.stream.id.hex(),
            None,
            None,
            None,
            0,
            0,
            0,
            None,
            None,
            None,
            None,
            (),
            rows,
            _sorted(reader.refused),
            unreadable,
        )
    versions = tuple(_versions(reader, newest))
    catalog = read_catalog(store, newest.catalog)
    cold_bytes, cold_steps, cold_anchor, problem = _cold_start(log, newest)
    return Overview(
        url=store.url,
        stream=log.stream.id.hex(),
        newest=newest.version,
        epoch=newest.epoch,
        publisher=newest.publisher.hex(),
        tensors=len(catalog.tensors),
        elements=sum(tensor.numel for tensor in catalog.tensors),
        dense_bytes=catalog.nbytes,
        cold_start_bytes=cold_bytes,
        cold_start_steps=cold_steps,
        cold_start_anchor=cold_anchor,
        chain_problem=problem,
        versions=versions,
        subscribers=rows,
        refused=_sorted(reader.refused),
        unreadable=unreadable,
    )


def _cold_start(log: VersionLog, newest: Manifest) -> tuple[int | None, int | None, int | None, str | None]:
    try:
        way = find_plan(log, None, newest.version)
    except ChainError as error:
        return None, None, None, error.message
    return way.nbytes, len(way.steps), way.steps[0].version, None


def _sorted(refused: Mapping[int, RefusedVersion]) -> tuple[RefusedVersion, ...]:
    return tuple(refused[version] for version in sorted(refused))


def _versions(reader: _Reader, newest: Manifest) -> Iterator[VersionRow]:
    first = max(0, newest.version - SHOWN_VERSIONS + 1)
    alternates = set(reader.log.alternates(first - 1))
    for version in range(first, newest.version + 1):
        manifest = reader.read(version)
        if manifest is not None:  # it may be refused, and the beginning of the log may have been trimmed
            yield VersionRow(
                version=version,
                kind=manifest.kind,
                base_version=manifest.base_version,
                nbytes=manifest.nbytes,
                changed=manifest.stats.changed,
                train_step=manifest.train_step,
                epoch=manifest.epoch,
                created_at=manifest.created_at,
                alternate=version in alternates,
            )


def _subscribers(
    reader: _Reader, newest: int, now: float
) -> tuple[tuple[SubscriberRow, ...], tuple[str, ...]]:
    rows, unreadable = [], []
    store = reader.log.store
    for info in store.list_after(SUBSCRIBERS):
        try:
            data = store.get(info.key, limit=MAX_STATUS_BYTES)
            rows.append(_subscriber(reader, SubscriberStatus.model_validate_json(data), newest, now))
        except ObjectMissing:
            continue  # removed since it was listed
        except (ValidationError, LimitExceeded):
            unreadable.append(info.key)
    return tuple(rows), tuple(unreadable)


def _subscriber(reader: _Reader, status: SubscriberStatus, newest: int, now: float) -> SubscriberRow:
    applied = -1 if status.applied_version is None else status.applied_version
    lag = max(0, newest - applied)
    missed = reader.read(applied + 1) if lag else None
    silent = max(0.0, now - status.updated_at)
    return SubscriberRow(
        status=status,
        lag_versions=lag,
        lag_seconds=0.0 if lag == 0 else max(0.0, now - missed.created_at) if missed else None,
        silent_seconds=silent,
        silent=status.state != "stopped" and silent > MISSED_RENEWALS * status.renew_seconds,
    )
