"""Which one of a stream's writers this process is, and what of the model it owns."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed

from chunkstore.errors import ConfigError
from manifest.log import StreamInfo
from manifest.parts import MAX_WRITERS, ShardRef
from manifest.signing import Signer
from publisher.seal import Sealed
from publisher.shard import Shard


@dataclass(frozen=True)
class Owned:
    """A shard of one canonical tensor that this process owns: what its optimizer steps, or what nothing steps.

    `tensor` holds, row-major, the elements of `name` from flat index `start` on, as many as it has; with `stride`, one
    per dimension of `tensor`, a box of them: its element k⃗ is element `start` + k⃗·`stride` of `name`. So columns 4 to 7
    of a matrix with rows of 16 are a tensor of 4 columns, `start` 4, `stride` (16, 1).
    """

    name: str
    tensor: torch.Tensor
    start: int = 0
    stride: Sequence[int] | None = None

    @property
    def strides(self) -> tuple[int, ...] | None:
        return None if self.stride is None else tuple(self.stride)


@dataclass(frozen=True)
class Writer:
    """One of `world_size` processes that feed one stream together. Number 0 coordinates them.

    `run`: the same text in all of them, and new with every start of the trainer. `owned`: this process's ranges; of all
    writers together they make up the model. None: every process has the whole model and steps all of it, as with DDP;
    then the tensors are dealt out. `group`: the process group they are in, where they tell each other at attach what
    they refuse; None: none that is known.

    Raises ConfigError.
    """

    rank: int
    world_size: int
    run: str
    owned: Sequence[Owned] | None = None
    group: distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size <= MAX_WRITERS:
            raise ConfigError(
                f"writer {self.rank} of {self.world_size} is impossible",
                hint=f"ranks count from 0, and there are at most {MAX_WRITERS} writers",
            )
        if not self.run:
            raise ConfigError(
                "the writers' run has no name", hint="a new random text for every start of the trainer"
            )

    @classmethod
    def of_process_group(
        cls, owned: Sequence[Owned] | None = None, group: distributed.ProcessGroup | None = None
    ) -> "Writer":
        """This process's place in torch.distributed. Collective: it makes up the run's name on rank 0 and sends it."""
        group = group or distributed.group.WORLD
        run = [secrets.token_hex(16)]
        first = 0 if group is None else distributed.get_global_rank(group, 0)
        distributed.broadcast_object_list(run, src=first, group=group)
        return cls(distributed.get_rank(group), distributed.get_world_size(group), run[0], owned, group)


@dataclass(frozen=True)
class Meeting:
    """Where one of the writers looks for the others: `stream`, an id, at the store `url`, signed with `key`."""

    url: str
    stream: bytes | None
    key: str | None

    @classmethod
    def at(cls, url: str, stream: StreamInfo | None, signer: Signer | None) -> "Meeting":
        """`stream`: None if there is none."""
        return cls(url, None if stream is None else stream.id, None if signer is None else str(signer.public))

    def check(self, other: "Meeting") -> None:
        """Raises ConfigError unless `other` is where the first writer, whose this is, waits."""
        if other.stream != self.stream:
            found = "no stream" if other.stream is None else f"stream {other.stream.hex()}"
            raise ConfigError(
                f"there is {found} at {other.url}, and not stream {(self.stream or b'').hex()}, which writer 0 has at "
                f"{self.url}",
                hint="all ranks need the same store; a folder has to be one that all of their machines see",
            )
        if other.key != self.key:
            raise ConfigError(
                f"writer 0 signs with {self.key or 'no key'}, this one with {other.key or 'no key'}",
                hint="all ranks need the same `signing` key",
            )


def shard_refs(sealed: Sequence[Sealed]) -> list[ShardRef]:
    """What sealed shards hold, for a part; those without elements are not named."""
    return [_shard_ref(one.shard, one.base, one.digest) for one in sealed if one.shard.numel]


def current_refs(shards: Sequence[Shard]) -> list[ShardRef]:
    """What the shards hold after the last step seen, for an answer to a call to join."""
    return [_shard_ref(shard, shard.base_digest, shard.kept_digest) for shard in shards if shard.numel]


def _shard_ref(shard: Shard, base: int, digest: int) -> ShardRef:
    region = shard.region
    return ShardRef(
        tensor=shard.id, start=region.start, size=list(region.size), stride=list(region.stride),
        base=base, digest=digest,
    )  # fmt: skip
