"""Read a Hugging Face safetensors folder: names, dtypes, shapes, and digests straight from the files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from chunkstore.digest import digest
from chunkstore.dtypes import WIDTH, Bits, bits_dtype
from chunkstore.torch_dtypes import BIT_DTYPES
from manifest.catalog import TensorSpec
from publisher.errors import MappingMismatch

_SLICE_BYTES = 64 << 20


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder of safetensors files. Open it with `Checkpoint.open`."""

    directory: Path
    tensors: dict[str, TensorSpec]
    files: dict[str, Path]  # by tensor name

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Raises MappingMismatch if there is no readable checkpoint, or a name stands in two files."""
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise MappingMismatch(
                f"base checkpoint {directory} holds no *.safetensors file",
                hint="point base_checkpoint at the Hugging Face folder that the run started from",
            )
        tensors: dict[str, TensorSpec] = {}
        files: dict[str, Path] = {}
        for path in paths:
            for spec in _read_specs(path):
                if spec.name in tensors:
                    raise MappingMismatch(
                        f"tensor {spec.name!r} stands in both {files[spec.name]} and {path}"
                    )
                tensors[spec.name] = spec
                files[spec.name] = path
        return cls(directory, tensors, files)

    def digest(self, name: str) -> int:
        """Digest of one tensor, computed from its bytes in the file."""
        return sum(digest(name, bits, start) for start, bits in self._slices(name)) % (1 << 64)

    def _slices(self, name: str) -> Iterator[tuple[int, Bits]]:
        spec = self.tensors[name]
        with safe_open(self.files[name], framework="pt") as file:
            flat = file.get_tensor(name).reshape(-1).view(BIT_DTYPES[spec.width])
        step = _SLICE_BYTES // spec.width
        for start in range(0, spec.numel, step):
            yield start, flat[start : start + step].numpy().view(np.dtype(bits_dtype(spec.dtype)))


def _read_specs(path: Path) -> list[TensorSpec]:
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            specs = [TensorSpec(n, p.get_dtype(), tuple(p.get_shape())) for n, p in parts.items()]
    except (SafetensorError, OSError) as error:
        raise MappingMismatch(f"cannot read base checkpoint file {path}: {error}") from error
    unknown = [s for s in specs if s.dtype not in WIDTH]
    if unknown:
        listed = ", ".join(f"{s.name} ({s.dtype})" for s in unknown[:10])
        raise MappingMismatch(f"{path} holds dtypes that cannot be published: {listed}")
    return specs
