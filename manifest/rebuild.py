"""Bring an image to one version, by whatever path is left."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from chunkstore.errors import CorruptObject, DeltasyncError, ObjectMissing
from manifest.errors import BaseMissing, ChainError, ManifestInvalid
from manifest.history import find_plan
from manifest.image import Image
from manifest.log import VersionLog
from manifest.schema import Manifest

if TYPE_CHECKING:  # it needs torch
    from manifest.checkpoint import Checkpoint


def rebuild(
    log: VersionLog,
    version: int,
    image: Image,
    check: Callable[[], None] = lambda: None,
    base: "Checkpoint | None" = None,
) -> Manifest:
    """Bring `image`, of the catalog of `version`, to that version; return the manifest whose digests it now has.

    The cheapest path first; around a step whose objects are gone, as they are once garbage collection has passed, or
    damaged, by another one. `check`: called before each chunk; may raise. `base`: the
    checkpoint that version 0 may refer to.
    Raises the error of the first path when none is left: ObjectMissing, CorruptObject,
    ManifestInvalid, BaseMissing, ChainError; or the store's.
    """
    unusable: set[bytes] = set()
    first: DeltasyncError | None = None
    while True:
        try:
            steps = find_plan(log, None, version, unusable, references=base is not None).steps
        except ChainError as error:
            if first is None:
                raise
            raise first from error
        for step in steps:
            try:
                if step.kind == "reference" and base is not None:
                    image.load(base, step)
                else:
                    image.apply(log.store, step, check)
            except (ObjectMissing, CorruptObject, ManifestInvalid, BaseMissing) as error:
                first = first or error
                unusable.add(step.hash)
                break
        else:
            return steps[-1]
