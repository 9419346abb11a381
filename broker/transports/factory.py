"""The transports of each setting, and how to make them.

    setting   a receiver offers                                 a sender can take
    auto      shm, zmq; on a GPU cuda, and NIXL                 whatever is offered
              for what lies on others, where there is RDMA
    cuda      the same                                          the same, but what lies on a GPU by cuda alone
    nixl      NIXL; on a GPU, also for what lies on others      NIXL
    another   that one                                          that one

Senders choose the first transport that both ends have and that works between them. For a GPU's memory: cuda, then NIXL
from GPU to GPU. After these, and for host memory: shared memory, NIXL, ZMQ and Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import zmq.asyncio
from redis.asyncio import Redis

from broker.transports.base import Connection, OnArrival, Receiver
from broker.transports.cuda.receiver import CudaReceiver
from broker.transports.cuda.runtime import CudaRuntime
from broker.transports.cuda.sender import CudaConnection, CudaSender
from broker.transports.nixl import agent as nixl_library
from broker.transports.nixl.agent import NixlAgent
from broker.transports.nixl.memory import MAX_TENSOR_BYTES, RECEIVE_BYTES, HostReceiveMemory, NixlArena, ReceiveMemory
from broker.transports.nixl.receiver import NixlReceiver
from broker.transports.nixl.sender import SEND_BYTES, NixlConnection, NixlCudaConnection
from broker.transports.redis.receiver import RedisReceiver
from broker.transports.redis.sender import RedisConnection
from broker.transports.shm.receiver import ShmReceiver
from broker.transports.shm.sender import ShmConnection
from broker.transports.zmq.transport import ZmqConnection, ZmqReceiver
from common.config import Transport
from common.errors import TriptychError, how_to_install

Connector: TypeAlias = Callable[[str], Connection[memoryview]]
"""Makes the connection to an address, for bytes of the host; does not connect yet."""
DeviceConnection: TypeAlias = CudaConnection | NixlCudaConnection
DeviceConnector: TypeAlias = Callable[[str], DeviceConnection]
"""The same for the memory of a GPU."""


@dataclass(frozen=True)
class TransportContext:
    """The setting and the means of a process that listens on `host`, a numeric address.

    `cuda` is set for an engine on a GPU. Raises TriptychError("invalid_request") if this host lacks the transport.
    """

    context: zmq.asyncio.Context
    host: str = "127.0.0.1"
    transport: Transport = "auto"
    redis: Redis | None = None
    cluster: str = "triptych"
    cuda: CudaRuntime | None = None

    def __post_init__(self) -> None:
        if self.transport == "cuda" and self.cuda is None:
            raise _unusable("cuda: this engine does not compute on a GPU; use another --transport")
        if self.transport == "nixl" and nixl_library.module_name() is None:
            raise _unusable(
                f"nixl: NIXL is not installed here; use another --transport, or install it: {how_to_install('nixl')}"
            )
        if self.transport == "redis" and self.redis is None:
            raise _unusable("redis: no broker is known; give --broker")

    @cached_property
    def nixl_agent(self) -> NixlAgent:
        """The agent for all of NIXL in this direction, sending or receiving."""
        return NixlAgent(self.host)


def make_receivers(means: TransportContext, max_bytes: int, stale_s: float, on_arrival: OnArrival) -> list[Receiver]:
    """Make the receiving ends of a setting on the running loop. See TensorReceiver for the bounds.

    Raises TriptychError("invalid_request") if NIXL is wanted, and does not start.
    """
    receivers: list[Receiver] = []
    nixl: list[tuple[ReceiveMemory, int]] = []  # with the largest tensor of each
    if means.cuda is not None and means.transport in ("cuda", "auto"):
        receivers.append(CudaReceiver(means.cuda, on_arrival, max_bytes=max_bytes))
    transport = _of_the_host(means.transport)
    if transport in ("zmq", "auto"):
        receivers.append(ZmqReceiver(means.context, means.host, on_arrival, max_bytes=max_bytes, stale_s=stale_s))
    if transport in ("shm", "auto"):
        receivers.append(ShmReceiver(on_arrival, max_bytes=max_bytes))
    if transport == "nixl":
        try:
            means.nixl_agent.start()
        except nixl_library.NixlError as error:
            raise _unusable(f"nixl: {error}; use another --transport") from error
        nixl.append((HostReceiveMemory(means.nixl_agent), max_bytes))
    if means.cuda is not None and _takes_from_gpus(transport, means.host):
        nixl.append((NixlArena(means.cuda, means.nixl_agent, RECEIVE_BYTES), min(max_bytes, MAX_TENSOR_BYTES)))
    for memory, most in nixl:
        agent, host = means.nixl_agent, means.host
        receivers.append(NixlReceiver(means.context, host, agent, memory, on_arrival, max_bytes=most, read_s=stale_s))
    if transport == "redis" and means.redis is not None:
        receivers.append(RedisReceiver(means.redis, means.cluster, on_arrival, max_bytes=max_bytes))
    return receivers


def make_connectors(means: TransportContext) -> dict[str, Connector]:
    """How to connect for bytes of the host, by scheme, the best first."""
    transport = _of_the_host(means.transport)
    connectors: dict[str, Connector] = {}
    if transport in ("shm", "auto"):
        connectors[ShmConnection.scheme] = ShmConnection
    if transport in ("nixl", "auto") and nixl_library.module_name() is not None:
        agent = means.nixl_agent
        connectors[NixlConnection.scheme] = lambda address: NixlConnection(means.context, agent, address)
    if transport in ("zmq", "auto"):
        connectors[ZmqConnection.scheme] = lambda address: ZmqConnection(means.context, address)
    if transport in ("redis", "auto") and (redis := means.redis) is not None:
        connectors[RedisConnection.scheme] = lambda address: RedisConnection(redis, address)
    return connectors


def make_device_connectors(means: TransportContext, closing: ExitStack) -> dict[str, DeviceConnector]:
    """How to connect for memory of a GPU, by scheme, the best first; empty without a GPU, or if the setting has none.

    The connections of a process share arenas, which `closing` frees.
    """
    connectors: dict[str, DeviceConnector] = {}
    if means.cuda is not None and means.transport in ("cuda", "auto"):
        sender = CudaSender(means.cuda)
        closing.callback(sender.close)
        connectors[CudaConnection.scheme] = partial(CudaConnection, sender)
    if means.cuda is not None and means.transport in ("nixl", "auto") and nixl_library.module_name() is not None:
        arena = NixlArena(means.cuda, means.nixl_agent, SEND_BYTES)
        closing.callback(arena.close)
        connectors[NixlCudaConnection.scheme] = partial(NixlCudaConnection, means.context, arena)
    return connectors


def gpu_bytes_of_nixl(transport: Transport, host: str) -> int:
    """Return the most bytes that NIXL takes of a GPU, to send and to receive, in a process that listens on `host`."""
    if nixl_library.module_name() is None:
        return 0
    takes = _takes_from_gpus(_of_the_host(transport), host)
    return (SEND_BYTES if transport in ("nixl", "auto") else 0) + (RECEIVE_BYTES if takes else 0)


def _takes_from_gpus(transport: Transport, host: str) -> bool:
    """Return whether NIXL carries tensors from other GPUs. Without RDMA other transports are faster."""
    if transport == "nixl":
        return True
    return transport == "auto" and nixl_library.module_name() is not None and nixl_library.has_rdma(host)


def _of_the_host(transport: Transport) -> Transport:
    """Return the setting for tensors in host memory."""
    return "auto" if transport == "cuda" else transport


def _unusable(why: str) -> TriptychError:
    return TriptychError("invalid_request", f"transport {why}", "transport")
