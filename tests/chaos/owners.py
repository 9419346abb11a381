"""Which process a connection belongs to, as Linux tells in /proc."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

Address = tuple[str, int]


def owner_of(near: Address, far: Address, pids: Iterable[int]) -> int | None:
    """Which of these processes has the connection from `near`, its own end, to `far`; None if none of them has."""
    inode = _inode(_as_hex(near), _as_hex(far))
    if inode is None:
        return None
    return next((pid for pid in pids if f"socket:[{inode}]" in _open_files(pid)), None)


def _inode(near: str, far: str) -> str | None:
    """Of the socket with these two ends."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if (fields[1], fields[2]) == (near, far):
            return fields[9]
    return None


def _open_files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # it has just ended
        for path in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(path.path))
    return found


def _as_hex(address: Address) -> str:
    """As in /proc/net/tcp: the address in this machine's byte order."""
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"
