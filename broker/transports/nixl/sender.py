"""Tensors over NIXL (UCX): for hosts with RDMA between them, where it is installed.

    sender: copies pieces into registered memory  <-- reads --  receiver: into memory of its own

What is said beside the bytes goes over ZMQ, with the cluster's keys; the bytes themselves are as open as UCX has them.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import numpy as np
import zmq.asyncio

from broker.transports.base import took_none
from broker.transports.checksums import with_checksum
from broker.transports.nixl.agent import HostMemory, NixlAgent, NixlError
from broker.transports.nixl.link import NixlLink
from broker.transports.nixl.receive_memory import HOST_SCHEME
from broker.transports.nixl.wire import PIECE_BYTES, WINDOW
from common.errors import TriptychError
from common.messages import TensorHeader


class NixlConnection(NixlLink):
    """See broker.transports.base.Connection. Returns when the receiver has all of a tensor; one goes at a time."""

    scheme: ClassVar[str] = HOST_SCHEME

    def __init__(self, context: zmq.asyncio.Context, agent: NixlAgent, address: str) -> None:
        """`agent` is that of the process."""
        super().__init__(context, address)
        self._agent = agent
        self._memory: HostMemory | None = None

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                self._number += 1
                if self._memory is None:
                    self._memory = HostMemory(self._agent, WINDOW * PIECE_BYTES)
                if not self._is_known():
                    await self._greet(self._memory)
                window, source = self._memory.array, np.asarray(data.cast("B"))

                async def fill(offset: int, start: int, size: int) -> None:
                    np.copyto(window[offset : offset + size], source[start : start + size])

                await self._send_pieces(await with_checksum(header, data), data.nbytes, self._memory.address, fill)
        except TimeoutError as error:
            raise took_none(self._address, timeout_s) from error
        except (NixlError, ValueError) as error:
            raise TriptychError("unavailable", f"the receiver of tensors at {self._address}: {error}") from error

    def close(self) -> None:
        super().close()
        if self._memory is not None:
            self._memory.deregister()
            self._memory = None
