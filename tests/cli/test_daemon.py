"""What both daemons do first."""

import ctypes
import subprocess
import sys

import pytest

PROBE = """
import ctypes, sys
from deltasync.commands._daemon import return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

class Info(ctypes.Structure):  # struct mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd".split()] + [
        ("rest", ctypes.c_size_t * 5)
    ]

libc.mallinfo2.restype = Info
if sys.argv[1] == "tuned":
    return_freed_memory()
libc.free(libc.malloc(16 << 20))  # a large block freed: by default, smaller ones are kept from now on
before = libc.mallinfo2().hblks
libc.malloc(2 << 20)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize(("how", "mapped"), [("as it comes", 0), ("tuned", 1)])
def test_large_blocks_get_pages_of_their_own(how: str, mapped: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, how], capture_output=True, text=True, check=True)
    assert int(done.stdout) == mapped
