"""The demo's daemons: `deltasync publisher run` and `deltasync subscriber run`, made to end when their stdin closes."""

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from deltasync.cli import main as deltasync

_SHARED_MEMORY: Final = Path("/dev/shm")
_STATE_RATIO: Final = 6
"""Weights and two moments in fp32, 12 bytes for each 2 of a bf16 checkpoint."""


@contextmanager
def make_spool(checkpoint: Path, work: Path) -> Iterator[Path]:
    """A folder for the state that trainer and publisher share: in memory if it fits there, else below `work`.

    Removed at the end with whatever a process that was killed left in it.
    """
    needed = 1.2 * _STATE_RATIO * sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    fits = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > needed
    # Containers often have 64 MB of shared memory. A file on disk works too, as fast as its page cache.
    with tempfile.TemporaryDirectory(prefix="deltasync-demo-", dir=_SHARED_MEMORY if fits else work) as spool:
        yield Path(spool)


def _end_with_stdin() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock the interpreter may want while it shuts down
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """argv: `publisher` or `subscriber`, and its YAML file."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    sys.exit(deltasync([sys.argv[1], "run", "--config", sys.argv[2]]))


if __name__ == "__main__":
    main()
