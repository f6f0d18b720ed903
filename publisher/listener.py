"""The socket in the spool at which a publisher process waits for its trainer."""

import fcntl
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from manifest.errors import LocalDiskError
from publisher.frames import SOCKET, Frames, socket_address

_LOCK: Final = "publisher.lock"


class Listener:
    """The socket in the spool, of which one process at a time may be the owner."""

    def __init__(self, spool: Path, patience: float) -> None:
        self._spool = spool
        self._patience = patience
        self._current: Frames | None = None
        self._stopped = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self._spool.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = stack.enter_context((self._spool / _LOCK).open("wb"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (self._spool / SOCKET).unlink(missing_ok=True)  # a dead predecessor's
                self._socket = stack.enter_context(socket.socket(socket.AF_UNIX))
                with socket_address(self._spool) as address:
                    self._socket.bind(address)
                    os.chmod(address, 0o600)
                self._socket.listen(4)
            except BlockingIOError as error:
                raise LocalDiskError(
                    f"another publisher process serves spool {self._spool}",
                    hint="stop it, or give this one a spool of its own",
                ) from error
            except OSError as error:
                raise LocalDiskError(
                    f"cannot listen in spool {self._spool}: {error}",
                    hint="it must be a local folder that this user may write",
                ) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        (self._spool / SOCKET).unlink(missing_ok=True)
        self._stack.close()

    def accept(self) -> Frames | None:
        """The next connection; None once stopped."""
        while not self._stopped:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._stopped:
                    break
                raise
            self._current = Frames(connection, self._patience)
            return self._current
        return None

    def hang_up(self) -> None:
        """End the current connection."""
        if self._current is not None:
            current, self._current = self._current, None
            current.shut()
            current.close()

    def stop(self) -> None:
        """Accept no more, and read no more requests from the current trainer. From a signal handler."""
        self._stopped = True
        self._socket.shutdown(socket.SHUT_RDWR)
        if self._current is not None:
            self._current.stop_reading()
