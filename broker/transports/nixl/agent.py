"""The part of the NIXL library that tensors need. Needs the optional extra `nixl`.

An agent moves bytes between registered memory of two processes: over InfiniBand, RoCE, shared memory or TCP, whatever
UCX finds between the two (UCX_TLS narrows the choice; tcp has to stay). https://github.com/ai-dynamo/nixl

UCX listens on every network device of the host, unless UCX_NET_DEVICES names one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from broker.transports.nixl.wire import HOST, Where

MODULES: Final = ("nixl_cu13", "nixl_cu12")
_RDMA_DEVICES: Final = Path("/dev/infiniband")
_EAGER_POLLS: Final = 200
_POLL_S: Final = 0.0005


def module_name() -> str | None:
    """Return the installed library's module; None without one."""
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), None)


def has_rdma(host: str) -> bool:
    """Return whether a process on `host` may use RDMA. Without, UCX carries a GPU's memory through the host's."""
    return not ip_address(host).is_loopback and any(_RDMA_DEVICES.glob("uverbs*"))


class NixlError(Exception):
    """The library has failed, or the other side has gone."""


@dataclass(eq=False)
class RegisteredBuffer:
    """A reference-counted piece of registered memory, for one tensor: its owner holds it, and each transfer into it."""

    where: Where
    address: int
    free: Callable[[], None]
    """Called once, when the last holder releases the buffer."""
    host: npt.NDArray[np.uint8] | None = None
    """The bytes, but for a GPU's."""
    _num_holders: int = 1

    def acquire(self) -> None:
        self._num_holders += 1

    def release(self) -> None:
        self._num_holders -= 1
        if self._num_holders == 0:
            self.free()


class RegisteredMemory:
    """Memory that agents of other processes may read, or this agent may fill. Deregister before freeing."""

    def __init__(self, agent: NixlAgent, address: int, num_bytes: int, where: Where) -> None:
        self.address = address
        self.where = where
        self._agent = agent
        self._registration = agent.call("register_memory", [(address, num_bytes, where[1], "")], where[0])

    @property
    def metadata(self) -> bytes:
        """The description that lets another agent read this memory; less than a kilobyte."""
        return bytes(self._agent.call("get_partial_agent_metadata", self._registration, True))

    def deregister(self) -> None:
        """Do nothing once the agent has been closed: closing ends every registration."""
        with suppress(NixlError):
            self._agent.call("deregister_memory", self._registration)


class HostMemory(RegisteredMemory):
    """New memory of the host, as `array`."""

    def __init__(self, agent: NixlAgent, num_bytes: int) -> None:
        self.array = np.empty(num_bytes, np.uint8)
        super().__init__(agent, int(self.array.ctypes.data), num_bytes, HOST)


@dataclass(eq=False)
class _Transfer:
    """A read that may write into `buffer`."""

    name: str
    handle: Any
    buffer: RegisteredBuffer
    abandoned: bool = False


class NixlAgent:
    """An agent: threads and connections of UCX, one agent per process and direction.

    The threads start with the first use, which takes half a second; from then on one thread keeps a core busy.
    Every method raises NixlError, and ImportError without the library. Belongs to one thread.
    """

    def __init__(self, host: str) -> None:
        """Serve a process that listens on `host`, a numeric address; on loopback UCX stays on loopback, too."""
        self._host = host
        self._agent: Any = None
        self._why_not = ""  # of an agent that cannot start, or start again
        self._known: Counter[str] = Counter()
        self._transfers: list[_Transfer] = []

    def start(self) -> None:
        """Start the threads now. A failed start is not tried again."""
        if self._why_not:
            raise NixlError(self._why_not)
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        if ip_address(self._host).is_loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # NIXL's own option takes InfiniBand's names only
        name = module_name()
        if name is None:
            raise ImportError("NIXL is not installed")
        try:
            api: Any = importlib.import_module(f"{name}._api")
            config = api.nixl_agent_config(backends=["UCX"])
            self._agent = api.nixl_agent(f"triptych-{secrets.token_hex(8)}", config)
        except Exception as error:  # as in `call`
            self._why_not = f"no NIXL agent: {error}"
            raise NixlError(self._why_not) from error

    def add_peer(self, metadata: bytes) -> str:
        """Register another agent, or more memory of a known agent; return its name. Each call wants a `remove_peer`."""
        name = self.call("add_remote_agent", metadata)
        text = name.decode() if isinstance(name, bytes) else str(name)
        self._known[text] += 1
        return text

    def remove_peer(self, name: str) -> None:
        """Forget another agent and close the connection, once no transfer from the agent is under way."""
        self._known[name] -= 1
        self.settle()

    async def read(
        self, name: str, where: Where, address: int, buffer: RegisteredBuffer, start: int, num_bytes: int
    ) -> None:
        """Copy `num_bytes` of another agent's memory into `buffer`, from `start` on."""
        self.settle()
        kind, device = buffer.where
        ours = self.call("get_xfer_descs", [(buffer.address + start, num_bytes, device)], kind)
        theirs = self.call("get_xfer_descs", [(address, num_bytes, where[1])], where[0])
        transfer = _Transfer(name, self.call("initialize_xfer", "READ", ours, theirs, name), buffer)
        self._transfers.append(transfer)
        buffer.acquire()
        polls, state = 0, "ERR"  # if the first call raises
        try:
            state = self.call("transfer", transfer.handle)
            while state == "PROC":
                await asyncio.sleep(0 if polls < _EAGER_POLLS else _POLL_S)
                polls, state = polls + 1, self._state_of(transfer)
        finally:
            transfer.abandoned = state == "PROC"
            if not transfer.abandoned:
                self._end(transfer)
        if state != "DONE":
            raise NixlError(f"a transfer from {name} ended in state {state}")

    def settle(self) -> None:
        """Release the buffers of abandoned transfers that have ended since, and forget removed agents.

        UCX cannot cancel a transfer: handle, agent and buffer all wait for its end.
        """
        for transfer in [transfer for transfer in self._transfers if transfer.abandoned]:
            if self._state_of(transfer) != "PROC":
                self._end(transfer)
        busy = {transfer.name for transfer in self._transfers}
        for name in [name for name, count in self._known.items() if count <= 0 and name not in busy]:
            del self._known[name]
            with suppress(NixlError):  # that agent has gone before, or ours is closed
                self.call("remove_remote_agent", name)

    def close(self) -> None:
        """End the agent's threads, connections and transfers. Idempotent."""
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            _release_handle(transfer)
        self._agent = None  # UCX writes nothing from now on
        self._why_not = self._why_not or "this agent has been closed"
        for transfer in transfers:
            transfer.buffer.release()

    def call(self, function: str, *arguments: Any) -> Any:
        """Call the library, whose exceptions have no common ancestor but Exception."""
        if self._agent is None:
            self.start()
        try:
            return getattr(self._agent, function)(*arguments)
        except Exception as error:
            raise NixlError(f"NIXL {function}: {error}") from error

    def _state_of(self, transfer: _Transfer) -> str:
        """PROC, DONE, or the error that ended the transfer."""
        try:
            return str(self.call("check_xfer_state", transfer.handle))
        except NixlError as error:
            return str(error)

    def _end(self, transfer: _Transfer) -> None:
        if transfer in self._transfers:  # else the agent has been closed meanwhile
            self._transfers.remove(transfer)
            _release_handle(transfer)
            transfer.buffer.release()


def _release_handle(transfer: _Transfer) -> None:
    """A handle would keep the library's agent alive."""
    with suppress(Exception):
        transfer.handle.release()
    transfer.handle = None
