"""The catalog: the canonical tensors of a stream, by name, dtype and shape, in name order.

A tensor's id is its position in the catalog. Aliases are further names of the same weights (tied parameters).
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Annotated, Final, Self

import blake3
import msgpack
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chunkstore.dtypes import SPARSE, WIDTH
from chunkstore.errors import FormatUnsupported
from manifest.errors import ManifestInvalid

CATALOG_FORMAT: Final = 1
MAX_TENSORS: Final = 1 << 20
MAX_CATALOG_BYTES: Final = 256 << 20
_NAME = re.compile(r"[!-~]{1,512}")  # printable ASCII without spaces
ADAPTER_PREFIX: Final = "base_model.model."
"""With which the names of every tensor of a PEFT adapter begin, and of nothing else."""
_ROOT_DOMAIN: Final = b"deltasync root digest v1\0"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One canonical tensor: checkpoint name, safetensors dtype name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes per element."""
        return WIDTH[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.width

    @property
    def sparse(self) -> bool:
        """True if changes may be sent element by element."""
        return self.dtype in SPARSE


class _WireTensor(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    name: str = Field(pattern=_NAME.pattern)
    dtype: str
    shape: list[Annotated[int, Field(ge=0, lt=1 << 40)]] = Field(max_length=16)


class _WireCatalog(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: int
    tensors: list[_WireTensor] = Field(max_length=MAX_TENSORS)
    aliases: dict[str, str] = Field(max_length=MAX_TENSORS)


@dataclass(frozen=True)
class Catalog:
    """Canonical tensors sorted by name, and `aliases`: other name → canonical name.

    Build it with `Catalog.of`, which sorts and checks; raises ManifestInvalid naming every offender.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: list[TensorSpec], aliases: dict[str, str] | None = None) -> Self:
        catalog = cls(tuple(sorted(tensors, key=lambda t: t.name)), dict(sorted((aliases or {}).items())))
        problems = catalog._problems()
        if problems:
            raise ManifestInvalid(
                "catalog is not valid: " + "; ".join(problems[:20]), hint="fix the names listed"
            )
        return catalog

    @property
    def adapter(self) -> bool:
        """Whether these are the tensors of a PEFT adapter, not those of a model."""
        return bool(self.tensors) and all(t.name.startswith(ADAPTER_PREFIX) for t in self.tensors)

    def _problems(self) -> list[str]:
        names = [t.name for t in self.tensors]
        known = set(names)
        out = [f"{n!r} appears twice" for i, n in enumerate(names[1:]) if names[i] == n]
        out += [
            f"{t.name!r} is not printable ASCII of 1 to 512 characters"
            for t in self.tensors
            if not _NAME.fullmatch(t.name)
        ]
        out += [f"{t.name!r} has unknown dtype {t.dtype!r}" for t in self.tensors if t.dtype not in WIDTH]
        out += [f"{t.name!r} is too large: {t.shape}" for t in self.tensors if t.numel >= 1 << 40]
        out += [
            f"alias {a!r} of {n!r}, which is not in the catalog"
            for a, n in self.aliases.items()
            if n not in known
        ]
        out += [f"alias {a!r} is also a tensor" for a in self.aliases if a in known]
        out += [f"alias {a!r:.99} is not a name" for a in self.aliases if not _NAME.fullmatch(a)]
        return out

    @cached_property
    def ids(self) -> dict[str, int]:
        """Tensor id by canonical name (aliases not included)."""
        return {t.name: i for i, t in enumerate(self.tensors)}

    @property
    def nbytes(self) -> int:
        """Size of all tensors stored dense, in bytes."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def data(self) -> bytes:
        """The wire form; equal catalogs have equal bytes."""
        wire = {
            "format": CATALOG_FORMAT,
            "tensors": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in self.tensors],
            "aliases": self.aliases,
        }
        packed = msgpack.packb(wire)
        assert isinstance(packed, bytes)
        return packed

    @cached_property
    def hash(self) -> bytes:
        """blake3 of `data`, 32 bytes: the catalog's identity."""
        return blake3.blake3(self.data).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse and check the wire form. Raises ManifestInvalid or FormatUnsupported; executes nothing."""
        try:
            raw = msgpack.unpackb(data, strict_map_key=True)
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise ManifestInvalid(f"catalog is not msgpack: {error}") from error
        if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] != CATALOG_FORMAT:
            raise FormatUnsupported(
                f"catalog has format {raw['format']}, this release reads {CATALOG_FORMAT}",
                hint="upgrade deltasync",
            )
        try:
            wire = _WireCatalog.model_validate(raw)
        except ValidationError as error:
            raise ManifestInvalid(f"catalog does not match its schema: {error!s:.2000}") from error
        catalog = cls.of([TensorSpec(t.name, t.dtype, tuple(t.shape)) for t in wire.tensors], wire.aliases)
        if catalog.data != data:
            raise ManifestInvalid(
                "catalog is not in canonical form", hint="tensors and aliases are sorted by name"
            )
        return catalog


def root_digest(catalog: Catalog, digests: npt.NDArray[np.uint64]) -> bytes:
    """blake3 over name, dtype, shape and digest of every catalog tensor, 32 bytes (docs/FORMAT.md, "Root
    digest").

    `digests`: uint64, one per tensor in catalog order.
    """
    assert len(digests) == len(catalog.tensors)
    hasher = blake3.blake3(_ROOT_DOMAIN)
    for spec, value in zip(catalog.tensors, digests, strict=True):
        record = msgpack.packb([spec.name, spec.dtype, list(spec.shape), int(value)])
        assert isinstance(record, bytes)
        hasher.update(record)
    return hasher.digest()
