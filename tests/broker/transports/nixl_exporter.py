"""A process whose memory may be read by NIXL, over TCP: python -m tests.broker.transports.nixl_exporter NUM_BYTES

Prints the metadata of its agent and where the memory lies, then waits for the end of its input.
"""

from __future__ import annotations

import os
import sys

from broker.transports.nixl.agent import HostMemory, NixlAgent

FILLED_WITH = 7

if __name__ == "__main__":
    os.environ["UCX_TLS"] = "tcp,self"
    agent = NixlAgent("127.0.0.1")
    memory = HostMemory(agent, int(sys.argv[1]))
    memory.array[:] = FILLED_WITH
    print(f"exported {memory.metadata.hex()} {memory.address}", flush=True)
    sys.stdin.read()
