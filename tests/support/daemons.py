"""`deltasync subscriber run` as people start it: a process, with log lines that can be waited for."""

import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

WAIT: Final = 60.0
"""Seconds that nothing a daemon does should take, on a machine that is busy."""


class Daemon:
    """A running daemon whose log lines can be waited for."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert process.stderr is not None
        threading.Thread(target=self._read, args=(process.stderr,), daemon=True).start()

    def _read(self, stderr: IO[str]) -> None:
        for line in stderr:
            self.lines.put(line)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in a line that has not been read yet. Raises AssertionError if it does not come in time."""
        deadline, seen = time.monotonic() + WAIT, []
        while time.monotonic() < deadline:
            with suppress(queue.Empty):
                seen.append(self.lines.get(timeout=1))
                match = re.search(pattern, seen[-1])
                if match:
                    return match
        raise AssertionError(f"no line matches {pattern!r}:\n{''.join(seen)}")


def command(config: Path, *more: str) -> list[str]:
    """`deltasync subscriber run -c <config> …`"""
    return [sys.executable, "-P", "-m", "deltasync.cli", "subscriber", "run", "-c", str(config), *more]


@contextmanager
def daemon(config: Path) -> Iterator[Daemon]:
    """The daemon, started in the config's folder; killed at the end if it still runs."""
    with subprocess.Popen(command(config), cwd=config.parent, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Daemon(process)
        finally:
            process.kill()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
