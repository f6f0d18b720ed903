"""The checkpoint that version 0 may refer to, as far as this host has it."""

from pathlib import Path

from manifest.catalog import Catalog
from manifest.checkpoint import Checkpoint
from manifest.schema import Manifest


class Base:
    """`directory`: the folder, None if this host has none. Compared with what refers to it before it is used."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._proved: tuple[bytes, Checkpoint] | None = None

    @property
    def configured(self) -> bool:
        return self._directory is not None

    def proved(self, manifest: Manifest, catalog: Catalog) -> Checkpoint:
        """The checkpoint that `manifest`, of `catalog`, refers to. Reads all of it the first time.

        Raises BaseMissing, naming what differs.
        """
        assert self._directory is not None, "configured"
        if self._proved is None or self._proved[0] != manifest.hash:
            checkpoint = Checkpoint.open(self._directory)
            checkpoint.require(catalog.tensors, manifest.digest_array.tolist())
            self._proved = manifest.hash, checkpoint
        return self._proved[1]
