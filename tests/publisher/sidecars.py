"""Publisher processes to test with: real ones, and the same loop on a thread where nothing is to be killed."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from chunkstore.config import load_config
from chunkstore.metrics import StoreMetrics
from chunkstore.posix import PosixStore
from chunkstore.store import Store
from publisher.config import PublisherConfig
from publisher.listener import Listener
from publisher.report import Report
from publisher.service import serve_trainers

ROOT = Path(__file__).resolve().parents[2]
WAIT = 60.0


def write_config(folder: Path, *, timeout: float = 20.0, more: str = "inference_dtype: bfloat16") -> Path:
    """A publisher.yaml for both sides, with store and spool in `folder`."""
    path = folder / "publisher.yaml"
    path.write_text(
        f"store: {{url: '{folder / 'store'}'}}\nspool: '{folder / 'spool'}'\nhttp: null\n"
        f"capture_timeout: {timeout}\n{more}\n"
    )
    return path


def store_of(config: Path) -> Store:
    return PosixStore(config.parent / "store")


class Sidecar:
    """A running `deltasync publisher run` whose log lines can be waited for."""

    def __init__(self, config: Path, crash_at: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deltasync.cli", "publisher", "run", "-c", str(config)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "DELTASYNC_CRASH_AT": crash_at},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def __enter__(self) -> "Sidecar":
        self.wait_for("waiting for a trainer")
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait_for(self, pattern: str) -> None:
        """Until a line that has not been read yet matches. Raises queue.Empty after a minute of silence."""
        while not re.search(pattern, self._lines.get(timeout=WAIT)):
            pass

    def killed(self) -> bool:
        """Wait for the end; True if it was kill −9."""
        return self.process.wait(WAIT) == -signal.SIGKILL

    def _read(self, stderr: IO[str]) -> None:
        for line in stderr:
            self._lines.put(line)


@contextmanager
def sidecar_thread(
    config: Path, store: Store | None = None, report: Report | None = None
) -> Iterator[Listener]:
    """The same service on a thread of this process, with the store and the report that are given, if any."""
    settings = load_config(config, PublisherConfig)
    assert settings.spool is not None
    with Listener(settings.spool, settings.capture_timeout) as listener:
        report = report or Report(StoreMetrics())
        arguments = (settings, store or store_of(config), settings.spool, listener, report)
        thread = threading.Thread(target=serve_trainers, args=arguments)
        thread.start()
        try:
            yield listener
        finally:
            listener.stop()
            thread.join(WAIT)
            assert not thread.is_alive()
