"""What trainer and publisher process say to each other. Every message is checked before it is used.

`seq` is the number that the trainer holds still for (`publisher.spool.StateFile.held`), and names the answer.
"""

from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

import chunkstore.errors
import manifest.errors
import publisher.errors
from chunkstore.errors import DeltasyncError
from manifest.catalog import MAX_CATALOG_BYTES, MAX_TENSORS
from manifest.schema import MAX_MANIFEST_BYTES, Version
from manifest.sections import Count
from publisher.errors import SpoolInvalid
from publisher.shard import Source

PROTOCOL: Final = 1

_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=MAX_TENSORS)]], Field(max_length=MAX_TENSORS)]
_Steps = Annotated[list[Count], Field(max_length=MAX_TENSORS)]
_Seq = Annotated[int, Field(ge=1, lt=1 << 63)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class GroupRecord(Message):
    """What one parameter group's step used, and the step counts of its parameters, `tensors` by catalog id."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    tensors: _Ids
    steps: _Steps

    @model_validator(mode="after")
    def _one_step_each(self) -> Self:
        if len(self.tensors) != len(self.steps):
            raise ValueError(f"{len(self.tensors)} tensors but {len(self.steps)} step counts")
        return self


class Open(Message):
    """Watch the state file `state`: one source and step count per catalog tensor."""

    kind: Literal["open"] = "open"
    protocol: Literal[1] = PROTOCOL
    seq: _Seq
    state: str = Field(pattern=r"^[0-9a-f]{32}$")
    catalog: bytes = Field(max_length=MAX_CATALOG_BYTES)
    sources: list[Annotated[Source, Field(strict=False)]] = Field(max_length=MAX_TENSORS)
    steps: _Steps


class Step(Message):
    """One optimizer step is complete: capture it."""

    kind: Literal["step"] = "step"
    seq: _Seq
    groups: list[GroupRecord]


class Publish(Message):
    """Read the weights for a version. `missed`: steps not captured; if any, `groups` says where they led."""

    kind: Literal["publish"] = "publish"
    seq: _Seq
    train_step: Count | None
    anchor: bool
    missed: Count
    groups: list[GroupRecord]


class Close(Message):
    """Wait for the last version's outcome, then end."""

    kind: Literal["close"] = "close"
    seq: _Seq


class ErrorInfo(Message):
    """A typed error on its way to the other process."""

    kind: str
    message: str
    hint: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        if isinstance(error, DeltasyncError):
            return cls(kind=error.kind, message=error.message, hint=error.hint)
        return cls(kind=DeltasyncError.kind, message=f"the publisher process failed: {error!r}", hint="")

    def error(self) -> DeltasyncError:
        """The same error here."""
        return _KINDS.get(self.kind, DeltasyncError)(self.message, hint=self.hint)


class Alive(Message):
    """Still working on the request."""

    kind: Literal["alive"] = "alive"


class Done(Message):
    """Request `seq` has been carried out; the trainer may go on. `version`: newest known to be committed."""

    kind: Literal["done"] = "done"
    seq: _Seq
    version: Version


class Failed(Message):
    """Request `seq` has failed; without one, the connection has."""

    kind: Literal["failed"] = "failed"
    seq: _Seq | None
    error: ErrorInfo


class Result(Message):
    """The outcome of publish `seq`: a manifest, an error, or neither if nothing had changed. `anchored`: see Commit."""

    kind: Literal["result"] = "result"
    seq: _Seq
    manifest: bytes | None = Field(default=None, max_length=MAX_MANIFEST_BYTES)
    seconds: dict[str, float] = Field(default_factory=dict)
    anchored: bool = False
    error: ErrorInfo | None = None


Request = Annotated[Open | Step | Publish | Close, Field(discriminator="kind")]
Reply = Annotated[Alive | Done | Failed | Result, Field(discriminator="kind")]
REQUEST: Final[TypeAdapter[Open | Step | Publish | Close]] = TypeAdapter(Request)
REPLY: Final[TypeAdapter[Alive | Done | Failed | Result]] = TypeAdapter(Reply)

M = TypeVar("M")


def parse(raw: dict[str, Any], form: TypeAdapter[M]) -> M:
    """`raw` as one of `form`. Raises SpoolInvalid, naming what is wrong."""
    try:
        return form.validate_python(raw)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:5]
        )
        raise SpoolInvalid(
            f"a message does not match its schema: {problems:.1000}",
            hint="trainer and publisher process must run the same release of deltasync",
        ) from None  # pydantic's text repeats the input


def _kinds() -> dict[str, type[DeltasyncError]]:
    known = (
        value
        for module in (chunkstore.errors, manifest.errors, publisher.errors)
        for value in vars(module).values()
    )
    return {e.kind: e for e in known if isinstance(e, type) and issubclass(e, DeltasyncError)}


_KINDS: Final = _kinds()
