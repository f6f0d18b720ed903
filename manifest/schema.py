"""The manifest: the record that makes a version exist. msgpack on the wire, validated by pydantic."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

import blake3
import msgpack
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from chunkstore.codec import MAX_CHUNK
from chunkstore.errors import InvalidKey
from chunkstore.store import check_key
from manifest.keys import CHUNKS, MAX_VERSION, chunk_prefix
from manifest.records import read_record
from manifest.sections import Columns, Count, Sections

MANIFEST_FORMAT: Final = 1
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_CHUNK_BYTES: Final = MAX_CHUNK

Hash = Annotated[bytes, Field(min_length=32, max_length=32)]
Id = Annotated[bytes, Field(min_length=16, max_length=16)]
Version = Annotated[int, Field(ge=0, le=min(MAX_VERSION, (1 << 63) - 1))]
Seconds = Annotated[float, Field(allow_inf_nan=False)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ChunkRef(_Wire):
    """One chunk object: its key, exact length and blake3, and the sections it holds, in file order."""

    key: str
    nbytes: Annotated[int, Field(gt=0, le=MAX_CHUNK_BYTES)]
    hash: Hash
    sections: Sections

    @model_validator(mode="after")
    def _inside_the_stream(self) -> Self:
        try:
            check_key(self.key)
        except InvalidKey as error:
            raise ValueError(str(error)) from error
        if not self.key.startswith(CHUNKS):
            raise ValueError(f"chunk key {self.key!r:.99} is outside {CHUNKS}")
        return self


class Stats(_Wire):
    """What the publisher measured. Informative only: no reader decides anything by it."""

    elements: Count = 0  # elements of all catalog tensors
    changed: Count = 0  # elements stored
    ambiguous: Count = 0  # changed elements whose old value was not certain
    unproved_blocks: Count = 0  # blocks sent whole because no reconstruction matched their digest
    bytes_by_encoding: dict[str, Count] = Field(default_factory=dict)
    sources: dict[str, Count] = Field(default_factory=dict)  # elements watched by each capture source
    seconds: dict[str, Seconds] = Field(default_factory=dict)  # by phase: capture, seal, encode, upload


class Manifest(_Wire):
    """One committed version. `data` is what is stored; `hash` is its identity.

    kind "anchor": the chunks hold every tensor whole; no base. kind "delta": changes against `base_version`.
    A delta without chunks is a takeover: same weights, next epoch. kind "reference": version 0 as a checkpoint that
    both sides have; only its digests are stored.
    `digests`: little-endian uint64 per catalog tensor, in catalog order.
    """

    format: Literal[1] = MANIFEST_FORMAT
    stream: Id
    version: Version
    kind: Literal["anchor", "delta", "reference"]
    base_version: Version | None
    base_root: Hash | None
    root: Hash
    parent_hash: (
        Hash | None
    )  # of version − 1's manifest; None only at version 0. In an alternate: of the manifest it re-encodes
    epoch: Count
    publisher: Id
    commit_id: Id
    attempt: Id
    catalog: Hash
    train_step: Count | None
    optimizer_steps: Count  # covered by this version
    created_at: Seconds  # Unix seconds
    digests: bytes
    chunks: list[ChunkRef]
    stats: Stats
    signature: bytes | None = None  # manifest.signing; always the last field

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.digests) % 8:
            raise ValueError("digests are not whole 64-bit integers")
        if self.kind != "delta" and (self.base_version is not None or self.base_root is not None):
            raise ValueError("an anchor has no base")
        if self.kind == "reference" and (self.version != 0 or self.chunks):
            raise ValueError("only version 0 is a reference, and it stores nothing")
        if self.kind == "delta" and (self.base_version is None or self.base_root is None):
            raise ValueError("a delta names its base version and root")
        if self.base_version is not None and self.base_version >= self.version:
            raise ValueError("the base is not older than the version")
        # An alternate of version 0 names what it re-encodes; `link_refusal` refuses a parent of the version itself.
        if self.parent_hash is None and self.version != 0:
            raise ValueError("only version 0 has no parent")
        if self.version == 0 and self.kind == "delta":
            raise ValueError("version 0 is an anchor or a reference")
        if self.kind == "delta" and not self.chunks and self.base_root != self.root:
            raise ValueError("a delta without chunks changes the root")
        return self

    @model_validator(mode="after")
    def _own_chunks(self) -> Self:
        """No two tries share an object: each chunk lies under this version and attempt, and is named once."""
        prefix = chunk_prefix(self.version, self.attempt)
        strangers = [c.key for c in self.chunks if not c.key.startswith(prefix)]
        if strangers:
            raise ValueError(f"chunk {strangers[0]!r:.200} is not under {prefix}")
        if len({c.key for c in self.chunks}) != len(self.chunks):
            raise ValueError("a chunk is named twice")
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A validated copy, without the cached bytes and hash of the original, which pydantic would copy
        along.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **(update or {})})

    @cached_property
    def data(self) -> bytes:
        """The wire form."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}  # in wire order
        chunks = [{**dict(chunk), "sections": chunk.sections.as_maps()} for chunk in self.chunks]
        packed = msgpack.packb({**fields, "chunks": chunks, "stats": self.stats.model_dump()})
        assert isinstance(packed, bytes)
        return packed

    @property
    def signed_bytes(self) -> bytes:
        """What a signature covers: the wire form up to the value of `signature`, the same before and after signing."""
        return self.data[: -len(msgpack.packb(self.signature))]

    @cached_property
    def hash(self) -> bytes:
        """blake3 of the wire form, 32 bytes."""
        return blake3.blake3(self.data).digest()

    @property
    def digest_array(self) -> npt.NDArray[np.uint64]:
        """Tensor digests in catalog order."""
        return np.frombuffer(self.digests, dtype="<u8")

    @property
    def nbytes(self) -> int:
        """Size of all chunks, in bytes: what a reader has to fetch for this version."""
        return sum(c.nbytes for c in self.chunks)

    @property
    def sections(self) -> Columns:
        """The columns of all chunks' sections, in the chunks' order."""
        return Sections.joined(chunk.sections for chunk in self.chunks)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str) -> Self:
        """Parse what is stored under key `name`. Raises ManifestInvalid or FormatUnsupported; executes
        nothing.
        """
        return read_record(
            cls,
            data,
            name=f"manifest {name}",
            version=MANIFEST_FORMAT,
            hint="upgrade deltasync on this side first: readers before writers",
        )
