"""Rebuild one version from nothing but the store: anchor plus deltas, checked, tensor by tensor."""

from collections.abc import Iterator
from pathlib import Path

from chunkstore.codec import WINDOW
from chunkstore.dtypes import Bits
from chunkstore.store import Store
from manifest.catalog import TensorSpec
from manifest.image import scratch_image
from manifest.log import VersionLog, read_catalog
from manifest.rebuild import rebuild


def restore(
    store: Store, log: VersionLog, version: int, scratch: Path | None = None
) -> Iterator[tuple[TensorSpec, int, int, Bits]]:
    """Yield (tensor, tensor id, start, bits) of every window of every tensor of `version`, in catalog order.

    `start`: flat index of the window's first element; `bits`: a copy, as `bits_dtype` of the tensor's dtype, at most
    WINDOW elements. A tensor without elements yields nothing. Nothing is yielded before every tensor's digest, and
    so the root, is what the manifest promises. Needs disk of the model's size below `scratch` meanwhile.

    Raises ObjectMissing, CorruptObject, ManifestInvalid, ChainError, FormatUnsupported, or the store's error.
    """
    with scratch_image(read_catalog(store, log.read_required(version).catalog), scratch) as image:
        rebuild(log, version, image)
        for tensor, (spec, array) in enumerate(zip(image.catalog.tensors, image.arrays, strict=True)):
            for start in range(0, spec.numel, WINDOW):
                yield spec, tensor, start, array[start : start + WINDOW].copy()
