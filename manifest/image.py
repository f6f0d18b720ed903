"""All tensors of one version, in files mapped into memory, moved along a plan from version to version.

Each chunk is read once. Memory: one chunk and one window; the pages of the files are the system's to keep or drop.
Disk: the size of the model, which is why only commands that write or check a whole checkpoint use it.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from chunkstore import difference
from chunkstore.codec import Section
from chunkstore.digest import digest, digest_at
from chunkstore.dtypes import Bits, bits_dtype
from chunkstore.errors import CorruptObject
from chunkstore.store import Store
from chunkstore.words import counted
from manifest.catalog import Catalog, TensorSpec
from manifest.errors import LocalDiskError
from manifest.fetch import fetch_chunk
from manifest.layout import check_layout, name_of
from manifest.schema import Manifest

if TYPE_CHECKING:  # it needs torch
    from manifest.checkpoint import Checkpoint

_MASK = (1 << 64) - 1


class Image:
    """Flat arrays of bits, one per catalog tensor, and their digests, kept up to date by every write.

    `arrays` start as all zeros. After an error the content is some mixture, yet the digests are still those of what
    the arrays hold, so that a later anchor makes it whole again.
    """

    def __init__(self, catalog: Catalog, arrays: Sequence[Bits]) -> None:
        self.catalog = catalog
        self.arrays = arrays
        self.digests = [0] * len(catalog.tensors)

    def apply(self, store: Store, manifest: Manifest, check: Callable[[], None] = lambda: None) -> None:
        """Move from the base of `manifest` to its version and check every tensor's digest.

        `check`: called before each chunk; may raise.
        Raises ManifestInvalid, or ObjectMissing or CorruptObject naming the chunk; CorruptObject naming the
        manifest and the tensors whose digest is not the promised one; or the store's error.
        """
        check_layout(manifest, self.catalog)
        for ref in manifest.chunks:
            check()
            reader = fetch_chunk(store, ref, self.catalog)
            for i in range(len(reader.sections)):
                self.write(reader.decode(i))
        self.check(manifest, f"{store.url}: {name_of(manifest)}")

    def load(self, checkpoint: "Checkpoint", manifest: Manifest) -> None:
        """Take over the checkpoint that `manifest`, a reference, is. Raises ManifestInvalid, BaseMissing."""
        check_layout(manifest, self.catalog)
        checkpoint.require(self.catalog.tensors, manifest.digest_array.tolist())
        for tensor, spec in enumerate(self.catalog.tensors):
            for start, bits in checkpoint.windows(spec.name):
                self.write(Section(tensor, spec.dtype, start, start + len(bits), None, bits))
        self.check(manifest, f"{checkpoint.directory}")

    def check(self, manifest: Manifest, name: str) -> None:
        """Raise CorruptObject, naming the tensors, unless this holds the version of `manifest`, which `name` is."""
        promised = manifest.digest_array.tolist()
        wrong = [
            spec.name
            for spec, held, wanted in zip(self.catalog.tensors, self.digests, promised, strict=True)
            if held != wanted
        ]
        if wrong:
            raise CorruptObject(
                f"{name}: rebuilding version {manifest.version} does not give the promised digest of "
                f"{counted(len(wrong), 'tensor')}: {', '.join(wrong[:20])}",
                hint="the version cannot be used; ask the publisher for an anchor",
            )

    def write(self, section: Section) -> None:
        """Store the elements of `section`, whose base this holds, and update its tensor's digest."""
        name = self.catalog.tensors[section.tensor].name
        array = self.arrays[section.tensor]
        if section.offsets is None:
            old = array[section.start : section.stop]
            change = digest(name, section.values, section.start) - digest(name, old, section.start)
            old[:] = section.values
        else:
            at = section.offsets.astype(np.int64) + section.start
            before = array[at]
            values = difference.add(before, section.values) if section.relative else section.values
            change = digest_at(name, at, values) - digest_at(name, at, before)
            array[at] = values
        self.digests[section.tensor] = (self.digests[section.tensor] + change) & _MASK


def map_file(file: BinaryIO, header: bytes, specs: Sequence[TensorSpec]) -> list[Bits]:
    """Make the new `file` `header` and then the tensors `specs` without gaps, all zeros; returns them as flat arrays.

    The space is reserved first, so that a full disk is an OSError here and not a fault while writing.
    """
    size = len(header) + sum(spec.nbytes for spec in specs)
    file.write(header)
    file.flush()
    if size:
        os.posix_fallocate(file.fileno(), 0, size)
    mapped = np.memmap(file, np.uint8, "r+") if size else np.zeros(0, np.uint8)
    arrays = []
    at = len(header)
    for spec in specs:
        arrays.append(np.asarray(mapped[at : at + spec.nbytes]).view(bits_dtype(spec.dtype)))
        at += spec.nbytes
    return arrays


@contextmanager
def scratch_image(catalog: Catalog, directory: Path | None = None) -> Iterator[Image]:
    """An image in a temporary file in `directory` (the system's temporary directory if None), gone afterwards.

    The file has no name, so that it is gone as well if this process is killed. Raises LocalDiskError.
    """
    by_width = sorted(catalog.tensors, key=lambda spec: -spec.width)  # so that every array is aligned
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            mapped = map_file(file, b"", by_width)
        except OSError as error:
            raise LocalDiskError(
                f"cannot have {catalog.nbytes} bytes of temporary space in {directory or tempfile.gettempdir()}: "
                f"{error}",
                hint="free space there, or name another folder: --scratch, or anchors.scratch in publisher.yaml",
            ) from error
        arrays = {spec.name: array for spec, array in zip(by_width, mapped, strict=True)}
        yield Image(catalog, [arrays[spec.name] for spec in catalog.tensors])
