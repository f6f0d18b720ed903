"""What others read of a subscriber's status object: its lease, and the versions it refuses.

Lenient where the writer is strict: unknown keys are ignored, and what does not parse still counts as a lease.
"""

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chunkstore.errors import LimitExceeded, ObjectMissing
from chunkstore.store import Store
from manifest.keys import SUBSCRIBERS

MAX_STATUS_BYTES: Final = 1 << 20
MISSED_RENEWALS: Final = 3
"""A subscriber that has not renewed its status for this many intervals is silent."""

_LONGEST_RENEWAL: Final = 86400.0  # seconds; no more is believed


class Refusal(BaseModel):
    """A version that a subscriber tried and could not apply; `action`: of the error (chunkstore.errors.Action)."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    version: int
    kind: str
    action: str = ""


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    stream: str
    applied_version: int | None
    needs_version: int | None
    renew_seconds: float = Field(ge=0, allow_inf_nan=False)
    refused: list[Refusal] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lease:
    """`needs`: nothing that this or a later version needs may be deleted; None: it needs nothing yet.

    `seen`: when it was last renewed, in Unix seconds by the store's clock.
    """

    id: str
    needs: int | None
    renew_seconds: float
    seen: float
    applied: int | None = None
    refused: tuple[Refusal, ...] = ()

    def live(self, now: float, grace: float) -> bool:
        """Whether it still counts at `now`: silent for no longer than `grace` seconds, and three renewals."""
        return now - self.seen <= max(grace, MISSED_RENEWALS * min(self.renew_seconds, _LONGEST_RENEWAL))


def read_leases(store: Store, stream: bytes) -> list[Lease]:
    """The leases on `stream` (16 bytes). A status object that does not parse is a lease on every version."""
    leases = []
    for info in store.list_after(SUBSCRIBERS):
        name = info.key.removeprefix(SUBSCRIBERS).removesuffix(".json")
        try:
            wire = _Wire.model_validate_json(store.get(info.key, limit=MAX_STATUS_BYTES))
        except ObjectMissing:
            continue  # removed since it was listed
        except (ValidationError, LimitExceeded):
            leases.append(Lease(name, 0, 0.0, info.modified))
            continue
        if wire.stream in ("", stream.hex()):  # else of one that lay here before
            leases.append(
                Lease(
                    name,
                    wire.needs_version,
                    wire.renew_seconds,
                    info.modified,
                    wire.applied_version,
                    tuple(wire.refused),
                )
            )
    return leases
