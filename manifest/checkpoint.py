"""Read a Hugging Face safetensors folder: names, dtypes, shapes, bits and digests straight from the files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from chunkstore.codec import WINDOW
from chunkstore.digest import digest
from chunkstore.dtypes import WIDTH, Bits, bits_dtype
from chunkstore.errors import DeltasyncError
from chunkstore.torch_dtypes import BIT_DTYPES
from manifest.catalog import TensorSpec
from manifest.errors import BaseMissing


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder of safetensors files. Open it with `Checkpoint.open`."""

    directory: Path
    tensors: dict[str, TensorSpec]
    files: dict[str, Path]  # by tensor name

    @classmethod
    def open(cls, directory: Path, error: type[DeltasyncError] = BaseMissing) -> "Checkpoint":
        """Raises `error` if there is no readable checkpoint, or a name stands in two files."""
        paths = sorted(directory.expanduser().glob("*.safetensors"))
        if not paths:
            raise error(
                f"base checkpoint {directory} holds no *.safetensors file",
                hint="point base_checkpoint at the Hugging Face folder that the run started from",
            )
        tensors: dict[str, TensorSpec] = {}
        files: dict[str, Path] = {}
        for path in paths:
            for spec in _read_specs(path, error):
                if spec.name in tensors:
                    raise error(f"tensor {spec.name!r} stands in both {files[spec.name]} and {path}")
                tensors[spec.name] = spec
                files[spec.name] = path
        return cls(directory, tensors, files)

    def digest(self, name: str) -> int:
        """Digest of one tensor, computed from its bytes in the file."""
        return sum(digest(name, bits, start) for start, bits in self.windows(name)) % (1 << 64)

    def windows(self, name: str) -> Iterator[tuple[int, Bits]]:
        """Flat start and bits of every window of one tensor; the bits are the mapped file's own."""
        bits = self.bits(name)
        for start in range(0, len(bits), WINDOW):
            yield start, bits[start : start + WINDOW]

    def bits(self, name: str) -> Bits:
        """One tensor, flat."""
        spec = self.tensors[name]
        with safe_open(self.files[name], framework="pt") as file:
            flat = file.get_tensor(name).reshape(-1).view(BIT_DTYPES[spec.width])
        bits: Bits = flat.numpy().view(np.dtype(bits_dtype(spec.dtype)))
        return bits

    def require(self, specs: Sequence[TensorSpec], digests: Sequence[int]) -> None:
        """Raises BaseMissing, naming the offenders, unless every one of `specs` is in the files with its digest."""
        problems = []
        for spec, wanted in zip(specs, digests, strict=True):
            found = self.tensors.get(spec.name)
            if found is None:
                problems.append(f"{spec.name} is not in it")
            elif found != spec:
                problems.append(f"{spec.name} is {found.dtype} {found.shape}, not {spec.dtype} {spec.shape}")
            elif self.digest(spec.name) != wanted:
                problems.append(f"{spec.name} has other values")
        if problems:
            raise BaseMissing(
                f"base checkpoint {self.directory} is not the one that version 0 refers to: "
                + "; ".join(problems[:10]),
                hint="name the folder that the trainer started from as base_checkpoint",
            )


def _read_specs(path: Path, refused: type[DeltasyncError]) -> list[TensorSpec]:
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            specs = [TensorSpec(n, p.get_dtype(), tuple(p.get_shape())) for n, p in parts.items()]
    except (SafetensorError, OSError) as error:
        raise refused(f"cannot read base checkpoint file {path}: {error}") from error
    unknown = [s for s in specs if s.dtype not in WIDTH]
    if unknown:
        listed = ", ".join(f"{s.name} ({s.dtype})" for s in unknown[:10])
        raise refused(f"{path} holds dtypes that cannot be published: {listed}")
    return specs
