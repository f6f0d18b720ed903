"""The status object `subscribers/<id>.json`: what a subscriber holds and needs. The publisher and people read it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_REFUSED = 50

Text = Annotated[str, Field(max_length=4000)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ErrorStatus(_Wire):
    """One error: its kind and action (chunkstore.errors), and when it last happened, in Unix seconds."""

    kind: str
    action: str
    message: Text
    hint: Text
    at: float


class RefusedVersion(_Wire):
    """A version that this subscriber tried and could not apply; `kind` and `action` are the error's."""

    version: int
    kind: str
    action: str = ""
    message: Text


class SubscriberStatus(_Wire):
    """`state`: `serving` a verified version, `held` while it has none, `stopped`.

    `needs_version`: the lowest version whose objects this subscriber still reads, a lease on everything from there
    that is renewed with `updated_at` (Unix seconds), at least every `renew_seconds`. None: it needs nothing yet.
    """

    format: Literal[1] = 1
    id: str
    stream: str
    boot_id: str
    state: Literal["serving", "held", "stopped"]
    reason: str | None
    applied_version: int | None
    applied_root: str | None
    applied_at: float | None
    newest_version: int | None
    needs_version: int | None
    updated_at: float
    renew_seconds: float
    last_error: ErrorStatus | None
    refused: list[RefusedVersion] = Field(max_length=MAX_REFUSED)
    host: str
    release: str
