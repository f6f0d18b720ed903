"""Resolve a staged update against what is live, and prove, before anything is written, that it leads to its
manifest's digests.
"""

import shutil
from collections.abc import Callable
from typing import Final

import numpy as np

from chunkstore.digest import U64, digest, digest_at
from chunkstore.dtypes import Bits
from manifest.catalog import Catalog, root_digest
from manifest.merge import Update, resolve
from subscriber.disk import disk_errors
from subscriber.errors import VerificationFailed, name_offenders
from subscriber.staging import Held, StagedUpdate, StagingWriter
from subscriber.threads import Check

_MASK: Final = (1 << 64) - 1
_RESOLVED: Final = "resolved"  # inside the directory of the update with differences

Gather = Callable[[Update], list[Bits]]
"""The live bits of the elements an update would write, once per separate copy of the tensor."""


def verify(staged: StagedUpdate, gather: Gather, check: Check) -> tuple[StagedUpdate, int | None]:
    """Read all staged values and, against a base, the old ones.

    Returns the update as it may be written, without differences: `staged` itself if it has none, else another one
    inside its directory, which may be replaced by the next call; and how many elements will differ (None: no base).
    Memory: one window. Raises VerificationFailed naming every tensor that would not end as the manifest says,
    StagedLost, StagingFull, StagingUnavailable.
    """
    if staged.base is None:
        _verify_whole(staged, check)
        return staged, None
    if not staged.relative:
        return staged, _verify_changes(staged, staged.base, gather, check, lambda _: None)
    path = staged.path / _RESOLVED
    shutil.rmtree(path, ignore_errors=True)
    with (
        disk_errors(staged.path),
        StagingWriter(path, staged.catalog, staged.base, staged.target) as writer,
    ):
        changed = _verify_changes(staged, staged.base, gather, check, writer.add)
        return writer.finish(), changed


def _verify_changes(
    staged: StagedUpdate, base: Held, gather: Gather, check: Check, keep: Callable[[Update], None]
) -> int:
    """Check `staged` against `base`; every update is given to `keep` once its differences are resolved."""
    catalog = staged.catalog
    expected = [[int(value)] for value in base.digests]
    changed = 0
    for relative in staged.updates():
        check()
        name = catalog.tensors[relative.tensor].name
        old = gather(relative)
        # Where another copy differs from the first one, its own sum will not come out.
        update = resolve(relative, old[0])
        keep(update)
        sums = expected[update.tensor]
        if len(sums) < len(old):
            sums *= len(old)
        new_part = partial_digest(name, update, update.values)
        for copy, bits in enumerate(old):
            sums[copy] = (sums[copy] + new_part - partial_digest(name, update, bits)) & _MASK
        changed += int(np.count_nonzero(old[0] != update.values))
    wrong = [
        spec.name
        for spec, sums, value in zip(catalog.tensors, expected, staged.target.digest_array, strict=True)
        if any(total != int(value) for total in sums)
    ]
    if wrong:
        raise _failed(staged, wrong)
    return changed


def _verify_whole(staged: StagedUpdate, check: Check) -> None:
    catalog, goal = staged.catalog, staged.target.digest_array
    sums = [0] * len(catalog.tensors)
    reached = [0] * len(catalog.tensors)
    for update in staged.updates():
        check()
        if update.offsets is not None or update.start != reached[update.tensor]:
            raise _failed(staged, [catalog.tensors[update.tensor].name])
        reached[update.tensor] = update.stop
        name = catalog.tensors[update.tensor].name
        sums[update.tensor] = (sums[update.tensor] + digest(name, update.values, update.start)) & _MASK
    wrong = [
        spec.name
        for spec, total, end, value in zip(catalog.tensors, sums, reached, goal, strict=True)
        if total != int(value) or end != spec.numel
    ]
    if wrong:
        raise _failed(staged, wrong)


def partial_digest(name: str, update: Update, bits: Bits) -> int:
    """The digest of `bits` standing where `update` would write."""
    if update.offsets is None:
        return digest(name, bits, update.start)
    return digest_at(name, update.offsets.astype(np.int64) + update.start, bits)


def holds(catalog: Catalog, digests: U64, root: bytes) -> bool:
    """Whether live digests, in catalog order, are those of a version with that root digest."""
    return root_digest(catalog, digests) == root


def _failed(staged: StagedUpdate, wrong: list[str]) -> VerificationFailed:
    source = "an anchor" if staged.base is None else f"version {staged.base.version}"
    return VerificationFailed(
        f"version {staged.target.version} cannot be reached from {source}: the digests of "
        f"{name_offenders([repr(name) for name in wrong])} would differ from its manifest; nothing was written",
        hint="the subscriber tries a path from an anchor by itself",
    )
