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
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import numpy as np

from broker.transports.nixl.registered_buffer import HOST, RegisteredBuffer, Where

MODULES: Final = ("nixl_cu13", "nixl_cu12")
_RDMA_DEVICES: Final = Path("/dev/infiniband")
_EAGER_POLLS: Final = 200
_POLL_S: Final = 0.0005


def module_name() -> str | None:
    """The installed library; None where there is none."""
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), None)


def has_rdma(host: str) -> bool:
    """Whether a process that listens on `host` may use a network device that reads memory by itself: without one, as
    on loopback, UCX carries a GPU's memory through the host's in small pieces."""
    return not ip_address(host).is_loopback and any(_RDMA_DEVICES.glob("uverbs*"))


class NixlError(Exception):
    """The library has failed, or the other side has gone."""


class Memory:
    """Memory that agents of other processes may read, or this one may fill. Deregister it before it is freed."""

    def __init__(self, agent: NixlAgent, address: int, num_bytes: int, where: Where = HOST) -> None:
        self.address = address
        self.where = where
        self._agent = agent
        self._registration = agent.call("register_memory", [(address, num_bytes, where[1], "")], where[0])

    @property
    def metadata(self) -> bytes:
        """What another agent has to know to read this memory; less than a kilobyte."""
        return bytes(self._agent.call("get_partial_agent_metadata", self._registration, True))

    def deregister(self) -> None:
        """Nothing happens where the agent has been closed, and with it every registration."""
        with suppress(NixlError):
            self._agent.call("deregister_memory", self._registration)


class HostMemory(Memory):
    """New memory of the host."""

    def __init__(self, agent: NixlAgent, num_bytes: int) -> None:
        self.array = np.empty(num_bytes, np.uint8)
        super().__init__(agent, int(self.array.ctypes.data), num_bytes)


@dataclass(eq=False)
class _Transfer:
    """One that may write into a room."""

    name: str
    handle: Any
    room: RegisteredBuffer
    given_up: bool = False


class NixlAgent:
    """One agent: threads and connections of UCX, one per process and direction. They are made when they are first
    needed, which takes half a second; from then on one of the threads keeps a core busy.

    Raises NixlError from all that it does, ImportError where the library is not installed. Belongs to one thread.
    """

    def __init__(self, host: str) -> None:
        """Of a process that listens on `host`, a numeric address: on loopback, UCX is kept to that, too."""
        self._host = host
        self._agent: Any = None
        self._closed = False
        self._why_not = ""
        self._known: Counter[str] = Counter()
        self._transfers: list[_Transfer] = []

    def start(self) -> None:
        """Make them now. What could not be made once is not tried again."""
        if self._closed or self._why_not:
            raise NixlError(self._why_not or "this agent has been closed")
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

    def meet(self, metadata: bytes) -> str:
        """Get to know another agent, or more of its memory; its name, for as many `part` as there were of these."""
        name = self.call("add_remote_agent", metadata)
        text = name.decode() if isinstance(name, bytes) else str(name)
        self._known[text] += 1
        return text

    def part(self, name: str) -> None:
        """Forget another agent and close the connection: once nothing is read from it any more."""
        self._known[name] -= 1
        self.settle()

    async def read(
        self, name: str, where: Where, address: int, room: RegisteredBuffer, start: int, num_bytes: int
    ) -> None:
        """Copy bytes of another agent's memory into a room of ours, from `start` on."""
        self.settle()
        kind, device = room.where
        ours = self.call("get_xfer_descs", [(room.address + start, num_bytes, device)], kind)
        theirs = self.call("get_xfer_descs", [(address, num_bytes, where[1])], where[0])
        transfer = _Transfer(name, self.call("initialize_xfer", "READ", ours, theirs, name), room)
        self._transfers.append(transfer)
        room.hold()
        polls, state = 0, "ERR"  # where the first call raises
        try:
            state = self.call("transfer", transfer.handle)
            while state == "PROC":
                await asyncio.sleep(0 if polls < _EAGER_POLLS else _POLL_S)
                polls, state = polls + 1, self._state_of(transfer)
        finally:
            transfer.given_up = state == "PROC"
            if not transfer.given_up:
                self._end(transfer)
        if state != "DONE":
            raise NixlError(f"a transfer from {name} ended in state {state}")

    def settle(self) -> None:
        """Let go of the rooms of transfers that were given up and have ended since, and of agents that have gone.

        UCX goes on with a transfer until it is over, whatever it is told: it still writes when its handle has been
        released, and even when the other agent has been forgotten. So both wait for that, and so does the room.
        """
        for transfer in [transfer for transfer in self._transfers if transfer.given_up]:
            if self._state_of(transfer) != "PROC":
                self._end(transfer)
        busy = {transfer.name for transfer in self._transfers}
        for name in [name for name, count in self._known.items() if count <= 0 and name not in busy]:
            del self._known[name]
            with suppress(NixlError):  # it has gone before, or our own agent has
                self.call("remove_remote_agent", name)

    def close(self) -> None:
        """End the agent's threads and connections, and with them all transfers. Twice is fine."""
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            _release(transfer)
        self._agent, self._closed = None, True  # nothing is written from now on
        for transfer in transfers:
            transfer.room.let_go()

    def call(self, function: str, *arguments: Any) -> Any:
        """A function of the library, whose exceptions have no common ancestor but Exception."""
        if self._agent is None:
            self.start()
        try:
            return getattr(self._agent, function)(*arguments)
        except Exception as error:
            raise NixlError(f"NIXL {function}: {error}") from error

    def _state_of(self, transfer: _Transfer) -> str:
        """PROC, DONE, or else why it has ended."""
        try:
            return str(self.call("check_xfer_state", transfer.handle))
        except NixlError as error:
            return str(error)

    def _end(self, transfer: _Transfer) -> None:
        """Nothing happens where the agent has been closed meanwhile."""
        if transfer in self._transfers:
            self._transfers.remove(transfer)
            _release(transfer)
            transfer.room.let_go()


def _release(transfer: _Transfer) -> None:
    """The handle would keep the library's agent alive."""
    with suppress(Exception):
        transfer.handle.release()
    transfer.handle = None
