"""Compaction: store a committed version whole, built from an older anchor and deltas, without its trainer.

Disk: the model's size; memory: one chunk and `_BUDGET`. What was uploaded is read back and proved by digest before it
becomes an anchor, because garbage collection will delete the chain that the anchor replaces.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chunkstore.codec import WINDOW, Section
from chunkstore.crashpoints import crash_point
from chunkstore.digest import digest
from chunkstore.errors import ConfigError, CorruptObject, ObjectMissing
from chunkstore.probe import require_put_if_absent
from manifest.catalog import Catalog
from manifest.fetch import fetch_chunk
from manifest.image import Image, scratch_image
from manifest.keys import alternate_key, chunk_key
from manifest.layout import check_layout
from manifest.log import VersionLog, read_catalog
from manifest.rebuild import rebuild
from manifest.schema import Manifest, Stats
from publisher.errors import CompactionLate
from publisher.upload import Upload, Uploaded

if TYPE_CHECKING:  # it needs torch
    from manifest.checkpoint import Checkpoint

_BUDGET: Final = 128 << 20  # bytes of raw sections that wait for upload
_THREADS: Final = 2


def compact(
    log: VersionLog,
    version: int,
    grace: float,
    *,
    scratch: Path | None = None,
    base: "Checkpoint | None" = None,
    check: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> Manifest:
    """Store `version` whole, if it is not yet, and return the anchor.

    `grace`: seconds of garbage collection, of which half may pass: what is uploaded is nobody's until the anchor names
    it, and must not look left behind. `scratch`: for the model's size in temporary files. `base`: the
    checkpoint that version 0 may refer to. `check`: called now and then;
    may raise. `clock`: monotonic.

    Raises CompactionLate; what `manifest.rebuild.rebuild` does if the version cannot be rebuilt; CorruptObject if what
    was uploaded does not prove to be it; ObjectMissing if there is an anchor without all its objects; LocalDiskError;
    ConfigError for a signed stream without a key; before any work StoreUnsuitable or the store's error if it cannot be
    written; CommitUnknown or the store's error.
    """
    until = clock() + grace / 2

    def in_time() -> None:
        check()
        if clock() > until:
            raise CompactionLate(
                f"{log.store.url}: version {version} was not stored whole within {grace / 2:g} s",
                hint="give compaction and `store gc` the same, longer grace period, or a faster store",
            )

    original = log.read_required(version)
    existing = original if original.kind == "anchor" else log.read_alternate(version)
    if existing is not None:
        _require_objects(log, existing)
        return existing
    if original.signature is not None and not log.signs:
        raise ConfigError(
            f"{log.store.url} is signed: an anchor without a signature would be refused",
            hint="name a key that the subscribers trust",
        )
    require_put_if_absent(log.store)  # before the work, which is long
    catalog = read_catalog(log.store, original.catalog)
    attempt = secrets.token_bytes(16)
    with scratch_image(catalog, scratch) as image:
        rebuild(log, version, image, in_time, base)
        uploaded = _upload(log, version, attempt, image, in_time)
    anchor = log.signed(anchor_of(original, attempt, uploaded))
    _prove(log, anchor, catalog, in_time)
    in_time()
    crash_point("compact.before_anchor")
    winner = log.put_alternate(anchor).winner
    crash_point("compact.after_anchor")
    return winner


def anchor_of(manifest: Manifest, attempt: bytes, whole: Uploaded) -> Manifest:
    """The version of `manifest` once more, stored whole (alternates/…); not signed."""
    return manifest.model_copy(
        update={
            "kind": "anchor",
            "base_version": None,
            "base_root": None,
            "parent_hash": manifest.hash,
            "commit_id": secrets.token_bytes(16),
            "attempt": attempt,
            "chunks": whole.chunks,
            "signature": None,
            "stats": Stats(
                elements=manifest.stats.elements,
                changed=whole.changed,
                bytes_by_encoding=dict(whole.bytes_by_encoding),
            ),
        }
    )


def _require_objects(log: VersionLog, anchor: Manifest) -> None:
    for ref in anchor.chunks:
        if log.store.head(ref.key) is None:
            raise ObjectMissing(
                f"version {anchor.version} is stored whole, but {log.store.url}/{ref.key} of it is missing",
                hint="an anchor is never replaced: compact another version",
            )


def _upload(
    log: VersionLog, version: int, attempt: bytes, image: Image, in_time: Callable[[], None]
) -> Uploaded:
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="deltasync-compact")
    try:
        upload = Upload(log.store, lambda n: chunk_key(version, attempt, 0, n), pool, _BUDGET)
        for section in _sections(image):
            in_time()
            upload.add(section)
        return upload.finish()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _sections(image: Image) -> Iterator[Section]:
    for tensor, (spec, array) in enumerate(zip(image.catalog.tensors, image.arrays, strict=True)):
        for start in range(0, spec.numel, WINDOW):
            values = array[start : start + WINDOW].copy()  # the file is gone before the last one is encoded
            yield Section(tensor, spec.dtype, start, start + len(values), None, values)


def _prove(log: VersionLog, anchor: Manifest, catalog: Catalog, in_time: Callable[[], None]) -> None:
    """Read back what was uploaded. Raises CorruptObject or ManifestInvalid unless it is the version, to the digest."""
    check_layout(anchor, catalog)
    digests = [0] * len(catalog.tensors)
    for ref in anchor.chunks:
        in_time()
        reader = fetch_chunk(log.store, ref, catalog)
        for number in range(len(reader.sections)):
            section = reader.decode(number)
            name = catalog.tensors[section.tensor].name
            digests[section.tensor] += digest(name, section.values, section.start)
    promised = anchor.digest_array.tolist()
    pairs = zip(catalog.tensors, digests, promised, strict=True)
    wrong = [spec.name for spec, found, wanted in pairs if found % (1 << 64) != wanted]
    if wrong:
        raise CorruptObject(
            f"{log.store.url}/{alternate_key(anchor.version)} is not written: what was uploaded for it has other "
            f"digests in {len(wrong)} tensors: {', '.join(wrong[:20])}",
            hint="try again; if it happens again, suspect this machine's memory or disk",
        )
