"""Programs that look at their own heap: run in processes of their own, for malloc's settings last as long as one."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, ctypes, mmap, os, resource
from pathlib import Path
from common.process import malloc, memory_upkeep
libc = ctypes.CDLL(None)
if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
    raise SystemExit("no mallopt")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def touched():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * mmap.PAGESIZE

def block(size):
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    return address

def free(blocks):
    for address in blocks:
        libc.free(address)

def free_burst():
    burst = []
    for _ in range(1000):
        burst.append(block(64 * 2**10))
        block(4096)  # lives on, behind the large one
    free(burst)
"""


def printed_by(program: str) -> str:
    """Return the output of a Python program; skip the test where the C library lacks glibc's functions."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if "no mallopt" in done.stderr:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return done.stdout
