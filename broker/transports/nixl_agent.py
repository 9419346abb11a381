"""The NIXL library, an optional extra (`pip install triptych[nixl]`), as far as tensors need it.

An agent moves bytes between registered memory of two processes: over InfiniBand, RoCE, shared memory or TCP, whatever
UCX finds between the two (UCX_TLS narrows it down; tcp has to stay). https://github.com/ai-dynamo/nixl

UCX listens on every network device of the host, unless it is told of one: UCX_NET_DEVICES.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
from ipaddress import ip_address
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
MODULES: Final = ("nixl_cu13", "nixl_cu12")
_EAGER_POLLS: Final = 200
_POLL_S: Final = 0.0005


def module_name() -> str | None:
    """The installed library; None where there is none."""
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), None)


class NixlError(Exception):
    """The library has failed, or the other side has gone."""


class Memory:
    """Memory that agents of other processes may read, or this one may fill. Deregister it before it is freed."""

    def __init__(self, agent: NixlAgent, array: Bytes) -> None:
        self.array = array
        self._agent = agent
        self._registration = agent.call("register_memory", [(self.address, array.nbytes, 0, "")], "DRAM")

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def metadata(self) -> bytes:
        """What another agent has to know to read this memory; less than a kilobyte."""
        return bytes(self._agent.call("get_partial_agent_metadata", self._registration, True))

    def deregister(self) -> None:
        self._agent.call("deregister_memory", self._registration)


class NixlAgent:
    """One agent: threads and connections of UCX. Takes half a second to make; one per process and direction.

    Raises NixlError from all that it does, ImportError where the library is not installed. Belongs to one thread.
    """

    def __init__(self, host: str) -> None:
        """Of a process that listens on `host`, a numeric address: on loopback, UCX is kept to that, too."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        if ip_address(host).is_loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # NIXL's own option takes InfiniBand's names only
        name = module_name()
        if name is None:
            raise ImportError("NIXL is not installed")
        api: Any = importlib.import_module(f"{name}._api")
        self._agent: Any = None
        self._unfinished: list[tuple[Any, Memory]] = []
        self._agent = api.nixl_agent(f"triptych-{secrets.token_hex(8)}", api.nixl_agent_config(backends=["UCX"]))

    def meet(self, metadata: bytes) -> str:
        """Get to know another agent; its name."""
        name = self.call("add_remote_agent", metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, name: str) -> None:
        """Forget another agent and close the connection."""
        self.call("remove_remote_agent", name)

    async def read(self, name: str, address: int, into: Memory, start: int, num_bytes: int) -> None:
        """Copy bytes of another agent's memory into ours, from `start` on."""
        ours = self.call("get_xfer_descs", [(into.address + start, num_bytes, 0)], "DRAM")
        theirs = self.call("get_xfer_descs", [(address, num_bytes, 0)], "DRAM")
        handle = self.call("initialize_xfer", "READ", ours, theirs, name)
        polls, state = 0, self.call("transfer", handle)
        try:
            while state == "PROC":
                await asyncio.sleep(0 if polls < _EAGER_POLLS else _POLL_S)
                polls, state = polls + 1, self.call("check_xfer_state", handle)
        finally:
            self._end(handle, into)
        if state != "DONE":
            raise NixlError(f"a transfer from {name} ended in state {state}")

    def close(self) -> None:
        """End the agent's threads and connections."""
        self._agent = None

    def call(self, function: str, *arguments: Any) -> Any:
        """A function of the library, whose exceptions have no common ancestor but Exception."""
        try:
            return getattr(self._agent, function)(*arguments)
        except Exception as error:
            raise NixlError(f"NIXL {function}: {error}") from error

    def _end(self, handle: Any, into: Memory) -> None:
        """Let go of a transfer. One that cannot be broken off may write on: it keeps its memory."""
        try:
            self.call("release_xfer_handle", handle)
        except NixlError:
            self._unfinished.append((handle, into))
