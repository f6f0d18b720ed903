"""Disks that really are full: what the kernel then says is what the code has to understand."""

import os
import resource
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_SIZE: Final = 4 << 20


class Disk(ABC):
    """A file system at `folder` that can be filled up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def fill(self) -> None:
        """From now on nothing more fits."""

    @abstractmethod
    def free(self) -> None:
        """There is room again."""


class Limited(Disk):
    """Everything is full: this process may write no file larger than a few bytes. Needs no rights."""

    _before: Final = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, self._before[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


class Mounted(Disk):
    """A small tmpfs of its own."""

    def fill(self) -> None:
        file = os.open(self.folder / ".filler", os.O_WRONLY | os.O_CREAT)
        try:
            with suppress(OSError):
                while True:
                    os.write(file, bytes(4096))
        finally:
            os.close(file)

    def free(self) -> None:
        (self.folder / ".filler").unlink(missing_ok=True)


@contextmanager
def small_disk(kind: type[Disk], folder: Path) -> Iterator[Disk]:
    """A disk of that kind at `folder`."""
    folder.mkdir()
    disk = kind(folder)
    if kind is Mounted:
        mount(folder)
    try:
        yield disk
    finally:
        disk.free()
        if kind is Mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)


def mount(folder: Path) -> None:
    options = f"size={_SIZE},mode=0755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True, capture_output=True)


def _can_mount() -> bool:
    """In a mount namespace of its own, so that nothing is left of the trial."""
    trial = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    with suppress(OSError):
        return subprocess.run(trial, capture_output=True, check=False).returncode == 0
    return False


DISKS: Final[tuple[type[Disk], ...]] = (Limited, Mounted) if _can_mount() else (Limited,)
"""The kinds that this user can have."""
