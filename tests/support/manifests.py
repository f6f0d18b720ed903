"""Manifests without objects behind them, for tests of the log and of planning, which never look at chunks."""

import hashlib
from typing import Any

from manifest.keys import chunk_key
from manifest.schema import ChunkRef, Manifest, Stats
from manifest.sections import SectionRef, Sections

STREAM_ID = b"stream-of-tests!"
PUBLISHER = b"publisher-number"


def fixed_bytes(*parts: object, length: int = 32) -> bytes:
    """Bytes that depend on `parts` only: stand-ins for hashes and random ids."""
    return hashlib.sha256(repr(parts).encode()).digest()[:length]


def make_manifest(
    version: int,
    parent: Manifest | None = None,
    *,
    base: Manifest | None = None,
    nbytes: int = 100,
    salt: object = "",
    **changes: Any,
) -> Manifest:
    """A valid manifest of `version`: a delta against `base`, or an anchor; its one chunk has `nbytes` bytes.

    With `nbytes` 0 it has no chunk, and a delta keeps its base's root. `salt` makes manifests differ;
    `changes` replaces fields.
    """
    attempt = fixed_bytes("attempt", version, salt, length=16)
    chunk = ChunkRef(
        key=chunk_key(version, attempt, 0, 0),
        nbytes=max(nbytes, 1),
        hash=fixed_bytes("chunk", version, salt),
        sections=Sections.of([SectionRef(tensor=0, start=0, stop=4, whole=True, changed=4)]),
    )
    fields: dict[str, Any] = {
        "stream": STREAM_ID,
        "version": version,
        "kind": "anchor" if base is None else "delta",
        "base_version": None if base is None else base.version,
        "base_root": None if base is None else base.root,
        "root": base.root if base is not None and not nbytes else fixed_bytes("root", version),
        "parent_hash": parent.hash
        if parent is not None
        else None
        if version == 0
        else fixed_bytes("unknown"),
        "epoch": parent.epoch if parent is not None else 1,
        "publisher": parent.publisher if parent is not None else PUBLISHER,
        "commit_id": fixed_bytes("commit", version, salt, length=16),
        "attempt": attempt,
        "catalog": fixed_bytes("catalog"),
        "train_step": None,
        "optimizer_steps": 1,
        "created_at": 1.5,
        "digests": b"",
        "chunks": [chunk] if nbytes else [],
        "stats": Stats(),
    }
    return Manifest(**(fields | changes))


def make_chain(length: int, *, first: int = 0) -> list[Manifest]:
    """An anchor at version `first`, then deltas each against the version before it."""
    chain = [make_manifest(first, nbytes=1000)]
    while len(chain) < length:
        chain.append(make_manifest(chain[-1].version + 1, chain[-1], base=chain[-1]))
    return chain


def make_alternate(original: Manifest, nbytes: int = 100, **changes: Any) -> Manifest:
    """An anchor that re-encodes `original`."""
    fields = {"parent_hash": original.hash, "root": original.root, "catalog": original.catalog, **changes}
    return make_manifest(original.version, nbytes=nbytes, salt="alternate", **fields)


def altered(manifest: Manifest, **changes: Any) -> Manifest:
    """A copy with fields replaced and nothing checked: what only a broken or hostile writer would make."""
    fields = {name: getattr(manifest, name) for name in Manifest.model_fields}
    return Manifest.model_construct(**(fields | changes))
