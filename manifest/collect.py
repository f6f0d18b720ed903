"""Garbage collection's I/O: read what a store holds, and delete what `manifest.gc` says may go."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from chunkstore.crashpoints import crash_point
from chunkstore.errors import FormatUnsupported
from chunkstore.probe import PROBES, store_clock
from chunkstore.store import Store
from manifest.errors import ManifestInvalid
from manifest.gc import Doomed, Encoding, Holdings, Policy, Reason, find_floor, lowest_needed
from manifest.keys import (
    ALTERNATES,
    ATTEMPTS,
    CHUNKS,
    PARTS,
    SUBSCRIBERS,
    VERSIONS,
    parse_alternate_key,
    parse_version_key,
)
from manifest.lease import read_leases
from manifest.log import VersionLog
from manifest.plan import alternate_refusal, link_refusal
from manifest.schema import Manifest

_DELETES: Final = 8
"""Deletions at a time, here; a store has its own limit."""


def read_holdings(log: VersionLog, policy: Policy) -> Holdings:
    """What the store of `log` holds, for `collectable` with the same policy.

    Manifests are read backwards from the newest version, no further than the floor. Writes and removes one probe, to
    know the store's time. Raises the store's errors; ManifestInvalid, FormatUnsupported or ForeignStream if the newest
    version cannot be read.
    """
    store = log.store
    # The time first and the objects last: ages are never too high, and nothing that a manifest names is missed.
    now = store_clock(store)
    committed = {
        version: info.modified
        for info in store.list_after(VERSIONS)
        if (version := parse_version_key(info.key)) is not None
    }
    alternates = {
        version: info.modified
        for info in store.list_after(ALTERNATES)
        if (version := parse_alternate_key(info.key)) is not None
    }
    newest = log.read_required(max(committed)) if committed else None
    leases = read_leases(store, log.stream.id)
    objects = [
        info for prefix in (CHUNKS, PARTS, ATTEMPTS, PROBES, SUBSCRIBERS) for info in store.list_after(prefix)
    ]
    held = Holdings(now, committed, {}, {}, (), objects, list(store.temporaries()), leases)
    return held if newest is None else _with_log(held, log, newest, alternates, policy)


def delete_garbage(
    store: Store, doomed: tuple[Doomed, ...], deleted: Callable[[Doomed], None] = lambda one: None
) -> None:
    """Delete them, several at a time; `deleted` is told of each, in order.

    May be interrupted anywhere and begun anew: what is left is found again. Raises the store's errors.
    """

    def delete(one: Doomed) -> Doomed:
        crash_point("gc.before_delete")
        if one.reason is Reason.TEMPORARY:
            store.delete_temporary(one.key)
        else:
            store.delete(one.key)
        crash_point("gc.after_delete")
        return one

    with ThreadPoolExecutor(_DELETES, thread_name_prefix="deltasync-gc") as threads:
        try:
            for one in threads.map(delete, doomed):
                deleted(one)
        except BaseException:  # also Ctrl-C: what has not begun is left for the next time
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def _with_log(
    held: Holdings, log: VersionLog, newest: Manifest, with_alternate: dict[int, float], policy: Policy
) -> Holdings:
    bound = lowest_needed(held.committed, held.leases, policy, held.now)
    assert bound is not None, "there is a version"
    versions: dict[int, Encoding] = {}
    alternates: dict[int, Encoding] = {}
    obscure: set[int] = set()
    held = replace(held, versions=versions, alternates=alternates, obscure=obscure)
    manifest: Manifest | None = newest
    while manifest is not None:
        version = manifest.version
        if version not in held.committed:
            break
        try:
            parent = log.read(version - 1) if version else None
            base = _base_of(log, manifest, parent)
        except (ManifestInvalid, FormatUnsupported):
            break
        if link_refusal(version, manifest, parent, base):
            break
        versions[version] = _encoding(manifest, held.committed[version])
        if version in with_alternate:
            try:
                alternate = log.read_alternate(version)
            except (ManifestInvalid, FormatUnsupported):
                obscure.add(version)
            else:
                if alternate is not None and alternate_refusal(alternate, manifest) is None:
                    alternates[version] = _encoding(alternate, with_alternate[version])
        whole = manifest.kind != "delta" or version in alternates
        if whole and version <= bound.version and find_floor(held, policy, bound) is not None:
            break
        manifest = parent
    return held


def _base_of(log: VersionLog, manifest: Manifest, parent: Manifest | None) -> Manifest | None:
    if manifest.base_version is None:
        return None
    return parent if manifest.base_version == manifest.version - 1 else log.read(manifest.base_version)


def _encoding(manifest: Manifest, written: float) -> Encoding:
    chunks = {ref.key: ref.nbytes for ref in manifest.chunks}
    return Encoding(manifest.base_version, manifest.attempt.hex(), chunks, written)
