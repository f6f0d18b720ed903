"""A store that follows a script of faults, as object stores have them when a commit is at stake."""

from collections.abc import Callable, Iterable
from enum import Enum

from chunkstore.errors import AccessDenied, StoreUnavailable
from chunkstore.store import Buffer, Store
from tests.support.faults import FaultStore


class Fault(Enum):
    NONE = "the call goes through"
    BEFORE = "503, and nothing was done"
    AFTER = "the effect happened, its reply is lost"
    DENIED = "403, and nothing was done"
    TAKEN = "412 although this very call, retried by a client below, created the object"


class LossyStore(FaultStore):
    """Takes one fault from `script` for every put_if_absent and get; when they run out, calls go through.

    `before_put` runs before each put_if_absent reaches the store below: another writer's chance to act.
    """

    def __init__(
        self, below: Store, script: Iterable[Fault], before_put: Callable[[], None] | None = None
    ) -> None:
        super().__init__(below, before=self._fault_before, after=self._fault_after)
        self._script = iter(script)
        self._fault = Fault.NONE
        self._before_put = before_put or (lambda: None)
        self.puts: list[tuple[str, bytes]] = []

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        self.puts.append((key, bytes(data)))
        created = super().put_if_absent(key, data)
        return created and self._fault is not Fault.TAKEN

    def _fault_before(self, operation: str, key: str) -> Exception | None:
        self._fault = next(self._script, Fault.NONE)
        if self._fault is Fault.BEFORE:
            return StoreUnavailable(f"{operation} {self.url}/{key}: 503")
        if self._fault is Fault.DENIED:
            return AccessDenied(f"{operation} {self.url}/{key}: 403")
        if operation == "put_if_absent":
            self._before_put()
        return None

    def _fault_after(self, operation: str, key: str) -> Exception | None:
        if self._fault is Fault.AFTER:
            return StoreUnavailable(f"{operation} {self.url}/{key}: the reply was lost")
        return None
