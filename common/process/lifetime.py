"""Child processes that never outlive their parent, for any death of the parent.

Linux kills the child when the *thread* that started it ends (PR_SET_PDEATHSIG): start the child from a thread that
lives as long.

Run as a script, `lifetime.py PARENT_PID PROGRAM ARGS...` ties itself to its parent and becomes the program. A function
run between fork and exec would be unsafe in threaded programs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process with its parent thread; exit now if the parent has died already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before the call
        os._exit(1)


def tied_command(command: list[str]) -> list[str]:
    """Return a command line for `command`, tied to the calling thread."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
