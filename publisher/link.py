"""The trainer's end of the connection to the publisher process."""

import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeAlias

from chunkstore.errors import DeltasyncError
from manifest.schema import Manifest
from publisher.commit import Commit
from publisher.errors import CaptureLost, SidecarUnavailable
from publisher.frames import SOCKET, Frames, socket_address
from publisher.messages import REPLY, Close, Done, Failed, Open, Publish, Result, Step, parse

Outcome: TypeAlias = Future[Commit | None]

_HINT: Final = "start `deltasync publisher run` with the same publisher.yaml; both must see the spool folder"
_RETRY_CONNECT: Final = 0.05  # seconds


class Link:
    """One connection. A thread of its own receives, so that results arrive while training goes on.

    Requests come from one thread. `patience`: seconds of silence after which the other side counts as gone.
    """

    def __init__(self, connection: socket.socket, patience: float) -> None:
        self._frames = Frames(connection, patience)
        self._patience = patience
        self._lock = threading.Lock()
        self._replies: dict[int, Future[int]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._heard = time.monotonic()
        self._ended: DeltasyncError | None = None
        self._reader = threading.Thread(target=self._read, name="deltasync-sidecar", daemon=True)
        self._reader.start()

    @classmethod
    def connect(cls, spool: Path, patience: float, *, wait: bool) -> "Link":
        """Connect; with `wait`, try for `patience` seconds. Raises SidecarUnavailable."""
        deadline = time.monotonic() + (patience if wait else 0.0)
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                with socket_address(spool) as address:
                    connection.connect(address)
            except OSError as error:
                connection.close()
                if time.monotonic() >= deadline:
                    raise SidecarUnavailable(
                        f"no publisher process answers at {spool / SOCKET}: {error}", hint=_HINT
                    ) from error
                time.sleep(min(_RETRY_CONNECT, max(0.0, deadline - time.monotonic())))
            else:
                return cls(connection, patience)

    @property
    def ended(self) -> bool:
        """True once the other side is known to be gone."""
        return self._ended is not None

    def request(
        self, message: Open | Step | Publish | Close, total: float | None, outcome: Outcome | None = None
    ) -> int:
        """Send and wait for the answer: the newest version known to be committed.

        `total`: seconds to wait at most, else CaptureLost; None: as long as signs of life come. `outcome` is completed
        when the request's Result arrives, unless this raises. Raises SidecarUnavailable, and what the other side says.
        """
        reply: Future[int] = Future()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._replies[message.seq] = reply
            if outcome is not None:
                self._outcomes[message.seq] = outcome
        begin = time.monotonic()
        try:
            self._frames.send(message.model_dump())
            return self._wait(message, reply, begin, total)
        except OSError as error:
            raise SidecarUnavailable(f"the publisher process is gone: {error}", hint=_HINT) from error
        except DeltasyncError:
            with self._lock:
                self._outcomes.pop(message.seq, None)
            raise
        finally:
            with self._lock:
                self._replies.pop(message.seq, None)

    def close(self) -> None:
        """Hang up; whatever is still awaited fails with SidecarUnavailable."""
        self._frames.shut()
        self._reader.join()
        self._frames.close()

    def _wait(
        self, message: Open | Step | Publish | Close, reply: "Future[int]", begin: float, total: float | None
    ) -> int:
        deadline = None if total is None else begin + total
        while True:
            silent = max(begin, self._heard) + self._patience
            until = silent if deadline is None else deadline
            try:
                return reply.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                if deadline is not None:
                    raise CaptureLost(
                        f"the publisher process did not finish {message.kind!r} within {total:g} s",
                        hint="nothing is lost; should it happen again, raise capture_timeout or upload_memory_mb",
                    ) from None
                if time.monotonic() >= max(begin, self._heard) + self._patience:
                    raise SidecarUnavailable(
                        f"the publisher process gave no sign of life for {self._patience:g} s",
                        hint="it is stopped, or serves another trainer on the same spool",
                    ) from None

    def _read(self) -> None:
        ended: DeltasyncError = SidecarUnavailable("the publisher process has hung up or died", hint=_HINT)
        try:
            while (raw := self._frames.receive()) is not None:
                self._heard = time.monotonic()
                message = parse(raw, REPLY)
                if isinstance(message, Failed) and message.seq is None:
                    ended = message.error.error()
                    break
                if isinstance(message, Done):
                    self._settle(message.seq, message.version)
                elif isinstance(message, Failed):
                    self._fail(message)
                elif isinstance(message, Result):
                    self._complete(message)
        except DeltasyncError as error:  # what was said makes no sense
            ended = error
        except OSError as error:
            ended = SidecarUnavailable(f"the connection to the publisher process broke: {error}", hint=_HINT)
        with self._lock:
            self._ended = ended
            waiting: list[Future[Any]] = [*self._replies.values(), *self._outcomes.values()]
            self._replies, self._outcomes = {}, {}
        for future in waiting:
            future.set_exception(ended)

    def _settle(self, seq: int, version: int) -> None:
        with self._lock:
            reply = self._replies.pop(seq, None)
        if reply is not None:  # else nobody waits any longer
            reply.set_result(version)

    def _fail(self, message: Failed) -> None:
        assert message.seq is not None
        with self._lock:
            reply = self._replies.pop(message.seq, None)
            self._outcomes.pop(message.seq, None)
        if reply is not None:
            reply.set_exception(message.error.error())

    def _complete(self, message: Result) -> None:
        commit = None
        if message.manifest is not None:
            manifest = Manifest.from_bytes(message.manifest, name="in the publisher process's answer")
            commit = Commit(manifest.version, manifest, message.seconds, message.anchored)
        with self._lock:
            outcome = self._outcomes.pop(message.seq, None)
        if outcome is None:
            return
        if message.error is not None:
            outcome.set_exception(message.error.error())
        else:
            outcome.set_result(commit)
