"""Room on local disk: asked for before it is used, and a typed error when it runs out."""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from subscriber.errors import StagingFull, StagingUnavailable

FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""No space, a quota, a limit on the size of files."""


def check_room(directory: Path, nbytes: int) -> None:
    """Make `directory`. Raise StagingFull unless `nbytes` more fit into its file system."""
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
    if nbytes > free:
        raise _full(directory, f"{nbytes} bytes are needed, {free} are free")


def check_writable(directory: Path) -> None:
    """Make `directory`. Raise StagingUnavailable unless files can be made in it; one is, and is gone at once."""
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turn OSError of the block into StagingFull or, for every other reason, StagingUnavailable."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise _full(directory, str(error)) from error
        raise StagingUnavailable(
            f"{directory} cannot be used: {error}",
            hint="let this user write there, or set state_dir (or staging_dir) to another folder",
        ) from error


def _full(directory: Path, why: str) -> StagingFull:
    return StagingFull(
        f"{directory} has too little room: {why}",
        hint="free space, or set staging_dir (or state_dir) to a larger file system",
    )
