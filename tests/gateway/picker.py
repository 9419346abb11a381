"""An endpoint picker: tells Envoy which cell should have a request, over ext_proc.

    python picker.py PORT CELL_URL…

As the Gateway API Inference Extension has it ("Endpoint Picker Protocol"): the answer is the header
`x-gateway-destination-endpoint` and the same in the metadata `envoy.lb`, the chosen address first, then those to try
after it. What it reads of a cell is what any picker can: `/ready`, and the `vllm:` gauges of the cell's proxy.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from google.protobuf.struct_pb2 import Struct
from prometheus_client.parser import text_string_to_metric_families

DESTINATION = "x-gateway-destination-endpoint"
POLL_S = 0.2
MAX_KEYS = 100_000
PREFIX_CHARACTERS = 200
"""A prompt's beginning is looked up by its first so many characters, twice as many, and so on."""
MEDIA_WEIGHT, PREFIX_WEIGHT = 2.0, 1.0
QUEUE_WEIGHT, KV_WEIGHT = 0.5, 1.0
"""Two requests in a queue undo the advantage of a known beginning, four that of a known picture."""


@dataclass
class Cell:
    """What is known of a cell: whether its proxy is ready, and what it has to do."""

    url: str
    ready: bool = False
    waiting: float = 0.0
    kv_usage: float = 0.0

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    async def look(self, http: httpx.AsyncClient) -> None:
        """Ask the cell's proxy how it is."""
        try:
            ready = await http.get(f"{self.url}/ready")
            self._read((await http.get(f"{self.url}/metrics")).text)
            self.ready = ready.is_success
        except httpx.HTTPError:
            self.ready = False

    def _read(self, text: str) -> None:
        gauges = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            if family.name.startswith("vllm:")
            for sample in family.samples
        }
        self.waiting = gauges.get("vllm:num_requests_waiting", 0.0)
        self.kv_usage = gauges.get("vllm:kv_cache_usage_perc", 0.0)


class Picker:
    """Chooses by what a cell has seen before, less what it has to do."""

    def __init__(self, cells: list[Cell]) -> None:
        self._cells = cells
        self._homes: OrderedDict[bytes, Cell] = OrderedDict()

    def choose(self, body: bytes) -> list[str]:
        """Return the addresses of all ready cells, the best first, and remember where the request goes."""
        media, prefixes = keys_of(body)
        ranked = sorted(
            (cell for cell in self._cells if cell.ready),
            key=lambda cell: (-self._score(cell, media, prefixes), cell.waiting, self._size(cell)),
        )
        for key in (*media, *prefixes) if ranked else ():
            self._homes[key] = ranked[0]
            self._homes.move_to_end(key)
        while len(self._homes) > MAX_KEYS:
            self._homes.popitem(last=False)
        return [cell.address for cell in ranked]

    def _score(self, cell: Cell, media: list[bytes], prefixes: list[bytes]) -> float:
        known = sum(self._homes.get(key) is cell for key in prefixes) / max(1, len(prefixes))
        seen = sum(self._homes.get(key) is cell for key in media) / max(1, len(media))
        load = QUEUE_WEIGHT * cell.waiting + KV_WEIGHT * cell.kv_usage
        return MEDIA_WEIGHT * seen + PREFIX_WEIGHT * known - load

    def _size(self, cell: Cell) -> int:
        """Return how many keys live at a cell: new ones go where fewer are."""
        return sum(home is cell for home in self._homes.values())


def keys_of(body: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return a key for each picture, recording or video of a request, and keys of its text's beginnings."""
    try:
        request = json.loads(body)
    except ValueError:  # a form with a file
        return [_digest(body)], []
    media, text = [], ""
    for part in _parts(request.get("messages") or request.get("prompt") or ""):
        if isinstance(part, str):
            text += part
        else:
            media.append(_digest(json.dumps(part, sort_keys=True).encode()))
    ends = range(PREFIX_CHARACTERS, len(text) + 1, PREFIX_CHARACTERS)
    return media, [_digest(text[:end].encode()) for end in ends]


def _parts(content: Any) -> Iterator[str | dict[str, Any]]:
    """Yield texts and media in order, wherever messages hold them."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for one in content:
            yield from _parts(one)
    elif isinstance(content, dict):
        if "content" in content or "text" in content:
            yield from _parts(content.get("content", content.get("text")))
        elif content.get("type", "").endswith(("_url", "_audio")):
            yield content


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=12).digest()


class Service(external_processor_pb2_grpc.ExternalProcessorServicer):
    """Envoy opens one stream per request: its head, then its whole body."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    async def Process(
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        async for message in request_iterator:
            kind = message.WhichOneof("request")
            if kind == "request_headers" and not message.request_headers.end_of_stream:
                yield ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse())
                continue
            yield self._answer(kind, message.request_body.body if kind == "request_body" else b"{}")

    def _answer(self, kind: str, body: bytes) -> Any:
        addresses = ",".join(self._picker.choose(body))
        metadata = Struct()
        if not addresses:  # no cell is ready: whatever Envoy takes answers with what is wrong
            return ext_proc.ProcessingResponse(**{kind: _response(kind, None)})
        metadata.update({"envoy.lb": {DESTINATION: addresses}})
        return ext_proc.ProcessingResponse(**{kind: _response(kind, addresses)}, dynamic_metadata=metadata)


def _response(kind: str, addresses: str | None) -> Any:
    common = ext_proc.CommonResponse()
    if addresses is not None:
        header = base_pb2.HeaderValue(key=DESTINATION, raw_value=addresses.encode())
        overwrite = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        common.header_mutation.set_headers.append(base_pb2.HeaderValueOption(header=header, append_action=overwrite))
    return (ext_proc.BodyResponse if kind == "request_body" else ext_proc.HeadersResponse)(response=common)


async def main(port: int, urls: list[str]) -> None:
    cells = [Cell(url) for url in urls]
    async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:
        await asyncio.gather(*(cell.look(http) for cell in cells))
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", 128 * 2**20)])
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(Service(Picker(cells)), server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.gather(*(cell.look(http) for cell in cells))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
