"""CPU cores of this process, and the shares of a host's workers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

from common.messages import Role
from launch.cluster.topology import Topology

_SHARE: Final[dict[Role, int]] = {
    "encoder": 1,
    "prefill": 2,
    "decode": 2,
    "prefill_decode": 2,
    "encode_prefill_decode": 3,
}


def available_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the usable cores: the process's affinity, lowered by a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = cgroup.read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2 here, or no quota ("max")
    return max(1, cores)


def split_threads(topology: Topology, cores: int) -> dict[Role, int]:
    """Return the CPU threads of a worker of each role. Decoders work all the time and get two shares, encoders a single
    share.

    At least one each; together no more than the cores, where there are enough.
    """
    shares = sum(share * topology.count(role) for role, share in _SHARE.items())
    return {role: max(1, cores * share // shares) for role, share in _SHARE.items()}
