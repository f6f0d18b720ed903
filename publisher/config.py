"""The publisher's configuration: one strict YAML file."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from chunkstore.config import Section
from chunkstore.http import HttpConfig
from chunkstore.open import StoreConfig
from manifest.key_files import SigningConfig


class PublisherHttpConfig(HttpConfig):
    """On another port than a subscriber of the same machine."""

    port: int = Field(default=8081, ge=0, le=65535)


class AnchorConfig(Section):
    """When the publisher process stores a version whole: the first of the two that holds; null turns one off.

    `every`: so many versions after the last anchor. `chain_weight`: when the versions since the last anchor have so
    many times its bytes. `grace`: what `store gc` is given, in seconds. `scratch`: a folder with room for the model.
    """

    every: int | None = Field(default=None, ge=1)
    chain_weight: float | None = Field(default=1.0, gt=0)
    grace: float = Field(default=86400.0, gt=0)
    scratch: Path | None = None


class PublisherConfig(Section):
    """What `publisher.yaml` may hold. Exactly one of `base_checkpoint` and `inference_dtype` is given."""

    store: StoreConfig
    base_checkpoint: Path | None = Field(
        default=None,
        description="Hugging Face folder the run starts from: gives names, dtypes and the mapping check",
    )
    inference_dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        default=None,
        description="dtype of every floating-point tensor on the rollout side, without a base checkpoint",
    )
    refer_to_base: bool = Field(
        default=False,
        description="version 0 refers to base_checkpoint, which the subscribers have too, instead of uploading it",
    )
    detect: Literal["auto", "snapshot"] = Field(
        default="auto",
        description="auto: invert AdamW and prove it; snapshot: keep a 16-bit copy, any optimizer",
    )
    lora: Literal["adapter", "merged"] | None = Field(
        default=None,
        description="of a PEFT model, which is refused without it: adapter: the active adapter alone, as PEFT saves "
        "it; merged: the base model with it merged in",
    )
    takeover: bool = Field(
        default=False, description="claim the stream again if another publisher claims it meanwhile"
    )
    signing: SigningConfig | None = Field(
        default=None,
        description="Ed25519 key that signs every version; the trainer needs none if it uses a spool",
    )
    upload_threads: int = Field(default=2, ge=1, le=64)
    upload_memory_mb: int = Field(
        default=256, ge=64, description="sections waiting for upload; the trainer is held while it is used up"
    )
    spool: Path | None = Field(
        default=None,
        description="folder in shared memory (/dev/shm/…) that trainer and `deltasync publisher run` both see; "
        "without it, all work is done in the trainer",
    )
    capture_timeout: float = Field(
        default=60.0, gt=0, description="seconds that the trainer waits for the publisher process at most"
    )
    anchors: AnchorConfig | None = Field(
        default=AnchorConfig(),
        description="when `deltasync publisher run` stores a version whole, beside the trainer; null: never",
    )
    http: PublisherHttpConfig | None = Field(
        default=PublisherHttpConfig(), description="of `deltasync publisher run`; null turns the server off"
    )
    writers_timeout: float = Field(
        default=120.0, gt=0, description="seconds that several writers of one stream wait for each other"
    )
    commit_deadline: float = Field(default=60.0, gt=0, description="seconds until a commit counts as unknown")

    @model_validator(mode="after")
    def _one_source_of_dtypes(self) -> Self:
        if (self.base_checkpoint is None) == (self.inference_dtype is None):
            raise ValueError("give exactly one of base_checkpoint and inference_dtype")
        if self.refer_to_base and self.base_checkpoint is None:
            raise ValueError("refer_to_base: needs base_checkpoint")
        return self

    @field_validator("store")
    @classmethod
    def _can_be_written(cls, store: StoreConfig) -> StoreConfig:
        if not store.can_publish:
            raise ValueError(
                f"url: {store.url!r}: publishers need a folder or s3://bucket/prefix; others are for reading only"
            )
        return store
