"""Bring an image to one version, by whatever path is left."""

from collections.abc import Callable

from chunkstore.errors import CorruptObject, DeltasyncError, ObjectMissing
from manifest.errors import ChainError, ManifestInvalid
from manifest.history import find_plan
from manifest.image import Image
from manifest.log import VersionLog
from manifest.schema import Manifest


def rebuild(
    log: VersionLog, version: int, image: Image, check: Callable[[], None] = lambda: None
) -> Manifest:
    """Bring `image`, of the catalog of `version`, to that version; return the manifest whose digests it now has.

    The cheapest path first; around a step whose objects are gone, as they are once garbage collection has passed, or
    damaged, by another one. `check`: called before each chunk; may raise.
    Raises the error of the first path when none is left: ObjectMissing, CorruptObject,
    ManifestInvalid, ChainError; or the store's.
    """
    unusable: set[bytes] = set()
    first: DeltasyncError | None = None
    while True:
        try:
            steps = find_plan(log, None, version, unusable).steps
        except ChainError as error:
            if first is None:
                raise
            raise first from error
        for step in steps:
            try:
                image.apply(log.store, step, check)
            except (ObjectMissing, CorruptObject, ManifestInvalid) as error:
                first = first or error
                unusable.add(step.hash)
                break
        else:
            return steps[-1]
