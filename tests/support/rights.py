"""What permissions forbid, also where the tests run as root."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERSION = 0x20080522  # linux/capability.h
_PASSES_PERMISSIONS = 1 << 1 | 1 << 2 | 1 << 3  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


@contextmanager
def without_privileges() -> Iterator[None]:
    """In this thread, and in those that it starts, files may be used as their permissions say."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    before = (ctypes.c_uint32 * 6)()  # twice effective, permitted, inheritable
    assert libc.capget(header, before) == 0
    fewer = type(before).from_buffer_copy(before)
    fewer[0] &= ~_PASSES_PERMISSIONS
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in `folder` may be made, changed or removed by who has no privileges."""
    paths = [folder, *folder.rglob("*")]
    modes = [path.stat().st_mode for path in paths]
    for path, mode in zip(paths, modes, strict=True):
        path.chmod(mode & 0o555)
    try:
        yield
    finally:
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)
