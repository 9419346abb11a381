"""A wire between two ends that a test can damage or hold up."""

from __future__ import annotations

import asyncio
from types import TracebackType

CHUNK_BYTES = 64 * 2**10


class Relay:
    """Passes on what it gets, both ways, between whoever connects to `address` and `target`, both of TCP.

    Byte number `damaged` of all those that go to the target comes out as another one. `flowing` holds up what goes to
    it, `num_passed` counts it. `cut` ends all connections; new ones are taken.
    """

    def __init__(self, target: str, damaged: int | None = None) -> None:
        self._scheme, _, place = target.partition("://")
        self._host, _, self._port = place.rpartition(":")
        self._damaged = damaged
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.num_passed = 0
        self.num_accepted = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"{self._scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, far_writer]
        for coroutine in (self._forward(reader, far_writer), _pump(far_reader, writer)):
            self._pumps.add(asyncio.create_task(coroutine))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := bytearray(await reader.read(CHUNK_BYTES)):
            await self.flowing.wait()
            if self._damaged is not None and 0 <= (place := self._damaged - self.num_passed) < len(data):
                data[place] ^= 0x10
            self.num_passed += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.close()
