"""Prove, before anything is written, that a staged update leads from what is live to its manifest's digests."""

from collections.abc import Callable

import numpy as np

from chunkstore.digest import U64, digest, digest_at
from chunkstore.dtypes import Bits
from manifest.catalog import Catalog, root_digest
from manifest.merge import Update
from subscriber.errors import VerificationFailed, name_offenders
from subscriber.staging import StagedUpdate
from subscriber.threads import Check

_MASK = (1 << 64) - 1

Gather = Callable[[Update], list[Bits]]
"""The live bits of the elements an update would write, once per separate copy of the tensor."""


def verify(staged: StagedUpdate, gather: Gather, check: Check) -> int | None:
    """Read all staged values and, against a base, the old ones. Returns how many elements will differ (None: no base).

    Memory: one window. Raises VerificationFailed naming every tensor that would not end as the manifest says,
    StagedLost.
    """
    catalog = staged.catalog
    goal = staged.target.digest_array
    if staged.base is None:
        _verify_whole(staged, goal, check)
        return None
    expected = [[int(value)] for value in staged.base.digests]
    changed = 0
    for update in staged.updates():
        check()
        name = catalog.tensors[update.tensor].name
        old = gather(update)
        sums = expected[update.tensor]
        if len(sums) < len(old):
            sums *= len(old)
        new_part = partial_digest(name, update, update.values)
        for copy, bits in enumerate(old):
            sums[copy] = (sums[copy] + new_part - partial_digest(name, update, bits)) & _MASK
        changed += int(np.count_nonzero(old[0] != update.values))
    wrong = [
        spec.name
        for spec, sums, value in zip(catalog.tensors, expected, goal, strict=True)
        if any(total != int(value) for total in sums)
    ]
    if wrong:
        raise _failed(staged, wrong)
    return changed


def _verify_whole(staged: StagedUpdate, goal: U64, check: Check) -> None:
    catalog = staged.catalog
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
