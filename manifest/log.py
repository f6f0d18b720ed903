"""The version log: a stream's manifests, one put-if-absent object per version.

A version exists exactly when its manifest does. Writers commit; readers tail. Nothing here is cached.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

import blake3
import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chunkstore.crashpoints import crash_point
from chunkstore.errors import CorruptObject, FormatUnsupported, LimitExceeded, ObjectMissing
from chunkstore.store import Store
from manifest.catalog import MAX_CATALOG_BYTES, Catalog
from manifest.errors import ChainError, ForeignStream, ManifestInvalid, Untrusted
from manifest.keys import (
    ALTERNATES,
    STREAM,
    VERSIONS,
    alternate_key,
    catalog_key,
    manifest_key,
    parse_alternate_key,
    parse_version_key,
)
from manifest.plan import alternate_refusal
from manifest.schema import MAX_MANIFEST_BYTES, Manifest
from manifest.settle import Patience, settle
from manifest.signing import Signer, Trust

STREAM_FORMAT: Final = 1
MAX_STREAM_BYTES: Final = 4096


class _WireStream(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: int
    stream: Annotated[bytes, Field(min_length=16, max_length=16)]


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What `stream.msgpack` says: the stream's random id, 16 bytes."""

    id: bytes


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """`won`: the offered manifest is the version. `winner`: the manifest that is, one's own or another's."""

    won: bool
    winner: Manifest


def create_or_open_stream(store: Store, patience: Patience | None = None) -> StreamInfo:
    """Open the stream at `store`, creating it if there is none; racing creators all get the one that won.

    Raises CommitUnknown, ManifestInvalid, FormatUnsupported, or the store's error.
    """
    try:
        return open_stream(store)
    except ObjectMissing:
        data = msgpack.packb({"format": STREAM_FORMAT, "stream": secrets.token_bytes(16)})
        assert isinstance(data, bytes)
        crash_point("stream.before_create")
        held = settle(store, STREAM, data, limit=MAX_STREAM_BYTES, patience=patience or Patience())
        crash_point("stream.after_create")
        return _parse_stream(store, held)


def open_stream(store: Store, trust: Trust | None = None) -> StreamInfo:
    """Open the existing stream at `store`. Raises ObjectMissing if there is none, ManifestInvalid,
    FormatUnsupported; Untrusted if `trust` is for another stream.
    """
    try:
        stream = _parse_stream(store, store.get(STREAM, limit=MAX_STREAM_BYTES))
    except ObjectMissing as error:
        raise ObjectMissing(
            f"there is no stream at {store.url}: {STREAM} is missing",
            hint="check the URL; a publisher creates the stream when it first attaches",
        ) from error
    if trust is not None and trust.stream not in (None, stream.id):
        raise Untrusted(
            f"{store.url}/{STREAM} is stream {stream.id.hex()}, only {trust.stream.hex()} is trusted",
            hint="check the URL and `trust.stream`; if both are right, the record was replaced: see docs/security.md",
        )
    return stream


def _parse_stream(store: Store, data: bytes) -> StreamInfo:
    name = f"{store.url}/{STREAM}"
    try:
        raw = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ManifestInvalid(f"{name} is not msgpack: {error}") from error
    if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] != STREAM_FORMAT:
        raise FormatUnsupported(
            f"{name} has format {raw['format']}, this release knows {STREAM_FORMAT}", hint="upgrade deltasync"
        )
    try:
        return StreamInfo(_WireStream.model_validate(raw).stream)
    except ValidationError as error:
        raise ManifestInvalid(f"{name} does not match its schema: {error!s:.2000}") from error


def put_catalog(store: Store, catalog: Catalog, patience: Patience | None = None) -> None:
    """Store `catalog` under its hash. Raises CorruptObject if that key holds other bytes; CommitUnknown."""
    key = catalog_key(catalog.hash)
    crash_point("catalog.before_put")
    held = settle(store, key, catalog.data, limit=MAX_CATALOG_BYTES, patience=patience or Patience())
    crash_point("catalog.after_put")
    if held != catalog.data:
        raise _wrong_hash(store, key)


def read_catalog(store: Store, catalog_hash: bytes) -> Catalog:
    """The catalog of that hash (32 bytes). Raises ObjectMissing, CorruptObject, ManifestInvalid,
    FormatUnsupported.
    """
    key = catalog_key(catalog_hash)
    data = _bounded(store, key, MAX_CATALOG_BYTES)
    if blake3.blake3(data).digest() != catalog_hash:
        raise _wrong_hash(store, key)
    return Catalog.from_bytes(data)


def _bounded(store: Store, key: str, limit: int) -> bytes:
    """As `store.get`. What is too large is refused as whatever else is no record, for readers go on with others."""
    try:
        return store.get(key, limit=limit)
    except LimitExceeded as error:
        raise ManifestInvalid(error.message) from error


def _wrong_hash(store: Store, key: str) -> CorruptObject:
    return CorruptObject(
        f"{store.url}/{key} does not have the hash its name promises",
        hint="the object was damaged or overwritten: delete it and let the publisher write an anchor",
    )


class VersionLog:
    """Commit, read and follow the versions of one stream.

    `trust`: every manifest that is read must satisfy it, else Untrusted is raised, a kind of ManifestInvalid.
    `signer`: signs what is `signed` here.
    """

    def __init__(
        self,
        store: Store,
        stream: StreamInfo,
        patience: Patience | None = None,
        *,
        trust: Trust | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.store = store
        self.stream = stream
        self.trust = trust
        self._signer = signer
        self._patience = patience or Patience()

    def signed(self, manifest: Manifest) -> Manifest:
        """`manifest` as it is to be committed, or stored as an alternate: signed, where this log has a signer."""
        return manifest if self._signer is None else self._signer.sign(manifest)

    @property
    def signs(self) -> bool:
        """Whether this log has a signer."""
        return self._signer is not None

    def check_trusted(self, manifest: Manifest, name: str) -> None:
        """Raises Untrusted, calling it `name`, unless `manifest` satisfies `trust`."""
        if self.trust is not None:
            self.trust.check_manifest(manifest, self.stream.id, name)

    def commit(self, manifest: Manifest, *, again: bool = False) -> CommitOutcome:
        """Make `manifest` its version, or learn which manifest is.

        Raises CommitUnknown when neither is known at the deadline: call again with the same manifest, and `again`,
        since an earlier offer may still land. After every other error the version is not this manifest:
        ForeignStream or ManifestInvalid if the key holds what no reader of this stream accepts, LimitExceeded, or the
        store's refusal.
        """
        if manifest.stream != self.stream.id:
            raise self._foreign(manifest_key(manifest.version), manifest)
        key = manifest_key(manifest.version)
        held = settle(
            self.store,
            key,
            manifest.data,
            limit=MAX_MANIFEST_BYTES,
            patience=self._patience,
            may_land=again,
        )
        if held == manifest.data:
            return CommitOutcome(True, manifest)
        return CommitOutcome(False, self._parse(key, held, manifest.version))

    def read(self, version: int) -> Manifest | None:
        """The manifest of `version`, or None if that version does not exist (yet, or any more).

        Raises ManifestInvalid, FormatUnsupported, ForeignStream.
        """
        return self._read(manifest_key(version), version)

    def read_required(self, version: int) -> Manifest:
        """As `read`, but raises ObjectMissing where it returns None."""
        manifest = self.read(version)
        if manifest is None:
            raise ObjectMissing(
                f"{self.store.url}/{manifest_key(version)} is missing: version {version} does not exist"
            )
        return manifest

    def tail(self, after: int) -> Iterator[Manifest]:
        """Manifests of `after` + 1, `after` + 2, … up to the first version that is not there."""
        version = after + 1
        while (manifest := self.read(version)) is not None:
            yield manifest
            version += 1

    def exists(self, version: int) -> bool:
        """Whether `version` is committed, by one HEAD request."""
        return self.store.head(manifest_key(version)) is not None

    def versions(self, after: int = -1) -> Iterator[int]:
        """Committed versions above `after`, ascending, from a listing."""
        start = manifest_key(after) if after >= 0 else ""
        for info in self.store.list_after(VERSIONS, start):
            version = parse_version_key(info.key)
            if version is not None:
                yield version

    def newest(self, after: int = -1) -> Manifest | None:
        """The newest manifest above version `after`, found by listing; None if there is none."""
        newest = max(self.versions(after), default=None)
        return None if newest is None else self.read_required(newest)

    def put_alternate(self, manifest: Manifest) -> CommitOutcome:
        """Store another encoding of a committed version, an anchor with the same root digest.

        Raises ChainError unless it is one; otherwise as `commit`.
        """
        refusal = alternate_refusal(manifest, self.read_required(manifest.version))
        if refusal:
            raise ChainError(f"alternate of version {manifest.version} is refused: {refusal}")
        key = alternate_key(manifest.version)
        held = settle(self.store, key, manifest.data, limit=MAX_MANIFEST_BYTES, patience=self._patience)
        if held == manifest.data:
            return CommitOutcome(True, manifest)
        return CommitOutcome(False, self._parse(key, held, manifest.version))

    def read_alternate(self, version: int) -> Manifest | None:
        """The alternate anchor of `version`, or None. Raises as `read`."""
        return self._read(alternate_key(version), version)

    def alternates(self, after: int = -1) -> list[int]:
        """Versions above `after` that have an alternate anchor, ascending."""
        start = alternate_key(after) if after >= 0 else ""
        found = (parse_alternate_key(info.key) for info in self.store.list_after(ALTERNATES, start))
        return [version for version in found if version is not None]

    def _read(self, key: str, version: int) -> Manifest | None:
        try:
            data = _bounded(self.store, key, MAX_MANIFEST_BYTES)
        except ObjectMissing:
            return None
        return self._parse(key, data, version)

    def _parse(self, key: str, data: bytes, version: int) -> Manifest:
        name = f"{self.store.url}/{key}"
        manifest = Manifest.from_bytes(data, name=name)
        self.check_trusted(manifest, name)
        if manifest.stream != self.stream.id:
            raise self._foreign(key, manifest)
        if manifest.version != version:
            raise ManifestInvalid(
                f"{name} holds the manifest of version {manifest.version}",
                hint="objects were moved or copied by hand",
            )
        return manifest

    def _foreign(self, key: str, manifest: Manifest) -> ForeignStream:
        return ForeignStream(
            f"{self.store.url}/{key} belongs to stream {manifest.stream.hex()}, not {self.stream.id.hex()}",
            hint="two streams share one prefix, or objects were copied: give each stream its own prefix",
        )
