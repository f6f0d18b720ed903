"""Calls and parts: how the writers of one stream agree on a version (docs/FORMAT.md, "Several writers").

The coordinator, writer 0, calls; every other writer answers a call with its part. Both are msgpack on the wire.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self

import blake3
import msgpack
from pydantic import BaseModel, ConfigDict, Field, model_validator

from chunkstore.regions import Region, nested
from manifest.catalog import MAX_TENSORS
from manifest.keys import chunk_prefix
from manifest.records import read_record
from manifest.schema import ChunkRef, Hash, Id, Stats, Version
from manifest.sections import Count
from manifest.signing import Signer

CALL_FORMAT: Final = 1
PART_FORMAT: Final = 1
MAX_CALL_BYTES: Final = 8 << 20
MAX_PART_BYTES: Final = 64 << 20
MAX_WRITERS: Final = 4096
_LAYOUT_DOMAIN: Final = b"deltasync layout v1\0"

Digest = Annotated[int, Field(ge=0, lt=1 << 64)]
Writer = Annotated[int, Field(ge=0, lt=MAX_WRITERS)]
Index = Annotated[int, Field(ge=0, lt=1 << 40)]
CallKind = Literal["version", "join", "joined", "unchanged", "abandoned"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    domain: ClassVar[bytes]  # of its signature
    if TYPE_CHECKING:
        signature: bytes | None  # declared by each record, for it is always the last field

    @property
    def signed_bytes(self) -> bytes:
        """As of a Manifest."""
        return self.data[: -len(msgpack.packb(self.signature))]

    def signed(self, signer: Signer) -> Self:
        """The same record, signed."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**fields | {"signature": signer.signature(self.domain, self.signed_bytes)})

    @cached_property
    def data(self) -> bytes:
        """The wire form."""
        packed = msgpack.packb(self.model_dump())
        assert isinstance(packed, bytes)
        return packed

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str) -> Self:
        """Parse what is stored under key `name`. Raises ManifestInvalid, FormatUnsupported; executes nothing."""
        return read_record(
            cls, data, name=name, version=1, hint="all writers of a stream run the same release"
        )


class Call(_Record):
    """What the coordinator says about one version.

    `version`, `join`: answer with your part, `join` without changes, to tell where you stand. `joined`, `unchanged`,
    `abandoned`: every attempt with a lower number at this version is over, and nothing of it will be committed.
    """

    format: Literal[1] = CALL_FORMAT
    stream: Id
    version: Version
    attempt: Id
    number: Count  # ascending within one version and layout: the highest is the newest
    kind: CallKind
    base: Hash | None  # of the manifest of version − 1; nil at version 0
    train_step: Count | None  # of a call of the kind `version`, except at version 0
    layout: Hash
    whole: list[Annotated[int, Field(ge=0, lt=MAX_TENSORS)]]  # tensors to send whole with the next version
    reason: str = Field(max_length=2000)  # why it was abandoned; for people
    signature: bytes | None = None
    domain = b"deltasync call v1\0"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.base is None) != (self.version == 0):
            raise ValueError("the base is nil at version 0 and only there")
        if (self.train_step is not None) != (self.kind == "version" and self.version > 0):
            raise ValueError("a train step belongs to a call for a version above 0 and to no other")
        if self.whole != sorted(set(self.whole)):
            raise ValueError("tensor ids are ascending and named once")
        if self.whole and self.kind in ("version", "join"):
            raise ValueError("only a call that ends attempts asks for whole tensors")
        return self

    @property
    def over(self) -> bool:
        """Whether it ends the attempts before it, instead of asking for parts."""
        return self.kind in ("joined", "unchanged", "abandoned")


class ShardRef(BaseModel):
    """Elements of one tensor that one writer owns, a nested strided region in normal form, and their digests.

    `base`: what the writer holds them to be in the version before; `digest`: what they are in this one.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tensor: Annotated[int, Field(ge=0, lt=MAX_TENSORS)]
    start: Index
    size: list[Annotated[int, Field(gt=1, lt=1 << 40)]] = Field(max_length=16)
    stride: list[Annotated[int, Field(gt=0, lt=1 << 40)]] = Field(max_length=16)
    base: Digest
    digest: Digest

    @model_validator(mode="after")
    def _normal(self) -> Self:
        if len(self.size) != len(self.stride) or not nested(tuple(self.size), tuple(self.stride)):
            raise ValueError("the region is not nested")
        if self.region.last >= 1 << 40:
            raise ValueError("the region ends beyond any tensor")
        if Region.of(self.start, self.size, self.stride) != self.region:
            raise ValueError("the region is not in normal form")
        return self

    @property
    def region(self) -> Region:
        return Region(self.start, tuple(self.size), tuple(self.stride))


class Part(_Record):
    """One writer's answer to a call: what it owns, what that is now, and the chunks that lead there.

    `base`, `train_step` and `layout` are the writer's own: the coordinator compares them with its call.
    """

    format: Literal[1] = PART_FORMAT
    stream: Id
    version: Version
    attempt: Id
    writer: Writer
    base: Hash | None
    train_step: Count | None
    layout: Hash
    shards: list[ShardRef]
    chunks: list[ChunkRef]
    stats: Stats
    signature: bytes | None = None
    domain = b"deltasync part v1\0"

    @model_validator(mode="after")
    def _own_chunks(self) -> Self:
        prefix = f"{chunk_prefix(self.version, self.attempt)}{self.writer}-"
        strangers = [c.key for c in self.chunks if not c.key.startswith(prefix)]
        if strangers:
            raise ValueError(f"chunk {strangers[0]!r:.200} is not under {prefix}")
        if len({c.key for c in self.chunks}) != len(self.chunks):
            raise ValueError("a chunk is named twice")
        return self


def layout_hash(catalog_hash: bytes, writers: int, run: str) -> bytes:
    """Identifies a group of writers: blake3 over the catalog's hash, how many they are, and the name of their run."""
    packed = msgpack.packb([catalog_hash, writers, run])
    assert isinstance(packed, bytes)
    return blake3.blake3(_LAYOUT_DOMAIN + packed).digest()
