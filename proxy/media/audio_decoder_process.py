"""The first thing that a process which decodes sound does. Imports little but what it will need."""

from __future__ import annotations

import signal

from broker.cluster.lifetime import die_with_parent
from common.process import malloc
from proxy.media import audio as audio  # loaded now rather than with the first recording


def initialize(parent_pid: int) -> None:
    """Gone with the parent, deaf to the terminal's Ctrl-C, and no larger after a long recording than before."""
    malloc.map_large_blocks()
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
