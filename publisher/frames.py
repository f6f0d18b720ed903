"""Frames between trainer and publisher process: 4 bytes of length, then msgpack, over a Unix domain socket.

Nothing is ever unpickled; a length is checked before anything is allocated for it.
"""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgpack

from chunkstore.errors import LimitExceeded
from manifest.schema import MAX_MANIFEST_BYTES
from publisher.errors import SpoolInvalid

MAX_FRAME: Final = MAX_MANIFEST_BYTES + (1 << 20)
SOCKET: Final = "publisher.sock"
_LENGTH: Final = struct.Struct("<I")
_PIECE: Final = 1 << 20


class Frames:
    """One connection. `send` from any thread, `receive` from one; sending gives up after `patience` seconds."""

    def __init__(self, connection: socket.socket, patience: float) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._set_timeout(socket.SO_SNDTIMEO, patience)

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError if the peer is gone or does not read; then the connection is of no more use."""
        data = msgpack.packb(message)
        if len(data) > MAX_FRAME:
            raise LimitExceeded(f"a message of {len(data)} bytes is over the limit of {MAX_FRAME}")
        with self._sending:
            try:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except OSError:
                self.shut()  # part of the frame may be out: nothing that followed would be understood
                raise

    def receive(self, within: float | None = None) -> dict[str, Any] | None:
        """The next message; None if the peer is gone. `within`: seconds it may take, else TimeoutError.

        Raises SpoolInvalid for what is not a message.
        """
        self._set_timeout(socket.SO_RCVTIMEO, within or 0.0)
        try:
            head = self._exactly(_LENGTH.size)
            if head is None:
                return None
            (length,) = _LENGTH.unpack(head)
            if length > MAX_FRAME:
                raise SpoolInvalid(f"a frame announces {length} bytes, the limit is {MAX_FRAME}")
            data = self._exactly(length)
        except BlockingIOError:
            raise TimeoutError(f"no message came within {within} s") from None
        except ConnectionError:
            return None
        return None if data is None else _unpack(data)

    def stop_reading(self) -> None:
        """`receive` finds the peer gone from now on; what is being sent still goes out."""
        self._shut(socket.SHUT_RD)

    def shut(self) -> None:
        """Both sides find the other gone."""
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _shut(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError:
            return  # the peer was faster

    def _set_timeout(self, which: int, seconds: float) -> None:
        whole = int(seconds)
        self._socket.setsockopt(
            socket.SOL_SOCKET, which, struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        )

    def _exactly(self, length: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(min(length - len(parts), _PIECE))
            if not part:
                return None
            parts += part
        return bytes(parts)


def _unpack(data: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise SpoolInvalid(f"a frame is not msgpack: {error}") from error
    if not isinstance(message, dict):
        raise SpoolInvalid(f"a frame holds {type(message).__name__}, not a message")
    return message


@contextmanager
def socket_address(spool: Path) -> Iterator[str]:
    """The socket's address, whatever the length of `spool`: addresses end at 108 bytes, paths do not."""
    folder = os.open(spool, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)
