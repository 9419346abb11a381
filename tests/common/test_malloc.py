"""What malloc is told: looked at from outside, in processes that have been told it and processes that have not."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's malloc that is told")
MIB = 2**20

_PROGRAM = """
import ctypes, os
from pathlib import Path
from common import malloc
libc = ctypes.CDLL(None)
if not hasattr(libc, "mallopt"):
    raise SystemExit("no mallopt")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
SETTING

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def block(size):
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    return address

libc.free(block(16 * 2**20))  # the default threshold is as high afterwards
before = resident()
large = []
for _ in range(8):
    large.append(block(4 * 2**20))
    block(2**16)  # lives on, behind the large one
for address in large:
    libc.free(address)
print(resident() - before)
"""


def _kept(setting: str) -> int:
    """Bytes that a process keeps of 32 MiB that it has freed."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("SETTING", setting)], capture_output=True, text=True, check=False
    )
    if "no mallopt" in done.stderr:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_large_blocks_between_small_ones_go_back_to_the_system() -> None:
    assert _kept("malloc.map_large_blocks()") < 2 * MIB  # half a MiB lives on


def test_without_being_told_it_keeps_them() -> None:
    assert _kept("") > 16 * MIB
