"""Real worker processes for tests, and a small proxy to talk to them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import redis
import zmq.asyncio
from PIL import Image, ImageDraw
from prometheus_client.parser import text_string_to_metric_families

from broker.cluster.rpc import WorkerClient
from common.hashing import content_hash
from common.messages import (
    Encode,
    Encoded,
    Failed,
    FromWorker,
    Generate,
    InputNeeded,
    InputSlot,
    InstanceRecord,
    Role,
    Tokens,
    ToWorker,
    decode_record,
)
from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from common.text.processor import TextProcessor
from tests.eventually import eventually
from tests.media_files import encoded

START_S = 120.0
Answer = TypeVar("Answer", Tokens, Encoded, Failed, InputNeeded)


def sign(colour: str, *, mark: int = 0, size: int = 112) -> bytes:
    """A PNG of a disc in one colour; `mark` makes another content of the same sight."""
    picture = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(picture).ellipse((size // 8, size // 8, size * 7 // 8, size * 7 // 8), fill=colour)
    picture.putpixel((0, 0), (255, 255, 255 - mark))
    return encoded(picture)


def about_pictures(request_id: str, media: list[bytes], text: str, max_tokens: int = 8) -> Generate:
    """A request about some pictures."""
    processor = TextProcessor(load_model_info("signpost"))
    content = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
    ids = processor.render_chat([{"role": "user", "content": content}])
    places = processor.placeholder_indices(ids, len(media))
    slots = [
        InputSlot(number, "image", content_hash("image", item), place)
        for number, (item, place) in enumerate(zip(media, places, strict=True))
    ]
    return Generate(request_id, ids, slots, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def encode_order(
    request_id: str, input_id: int, media: bytes, *, to: str = "d0", attempt: int = 0, timeout_s: float = 30.0
) -> Encode:
    digest, deadline_s = content_hash("image", media), time.monotonic() + timeout_s
    return Encode(request_id, input_id, attempt, "image", digest, media, to, deadline_s)


@dataclass
class Cluster:
    url: str
    name: str
    processes: dict[str, subprocess.Popen[bytes]]
    records: dict[str, InstanceRecord]
    logs: dict[str, Path] = field(default_factory=dict)

    def keys(self) -> list[bytes]:
        with redis.Redis.from_url(self.url) as client:
            return sorted(client.keys(f"{self.name}:*"))

    def stream_lengths(self) -> dict[bytes, int]:
        with redis.Redis.from_url(self.url) as client:
            return {key: client.xlen(key) for key in self.keys() if client.type(key) == b"stream"}

    def record(self, instance_id: str) -> InstanceRecord | None:
        """What the registry says of an instance now."""
        with redis.Redis.from_url(self.url) as client:
            value = client.get(f"{self.name}:instance:{instance_id}")
        return None if value is None else decode_record(value)

    def stop(self) -> tuple[list[int], float]:
        """Exit statuses, and the seconds that it took."""
        started_s = time.monotonic()
        for process in self.processes.values():
            process.terminate()
        return [process.wait(10) for process in self.processes.values()], time.monotonic() - started_s


@contextmanager
def cluster(url: str, logs: Path, roles: dict[str, Role], model: str = "signpost") -> Iterator[Cluster]:
    """Start workers under their instance ids and wait until all are registered."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    processes: dict[str, subprocess.Popen[bytes]] = {}
    paths = {instance_id: logs / f"{instance_id}.log" for instance_id in roles}
    try:
        for instance_id, role in roles.items():
            environment = os.environ | {
                "TRIPTYCH_MODEL": model,
                "TRIPTYCH_BROKER": url,
                "TRIPTYCH_CLUSTER": name,
                "TRIPTYCH_INSTANCE_ID": instance_id,
                "TRIPTYCH_PORT": "0",
                "TRIPTYCH_ENGINE__NUM_THREADS": "1",
                "TRIPTYCH_ENGINE__KV_CACHE_BYTES": "32MiB",
                "TRIPTYCH_ENGINE__ENCODER_CACHE_BYTES": "64MiB",
            }
            with paths[instance_id].open("wb") as log:
                processes[instance_id] = subprocess.Popen(
                    [sys.executable, "-m", "launch.cli.app", "worker", "--role", role],
                    env=environment,
                    stderr=log,
                    stdout=log,
                )
        yield Cluster(url, name, processes, _wait_for_records(url, name, processes, paths), paths)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _wait_for_records(
    url: str, name: str, processes: dict[str, subprocess.Popen[bytes]], logs: dict[str, Path]
) -> dict[str, InstanceRecord]:
    deadline_s = time.monotonic() + START_S
    with redis.Redis.from_url(url) as client:
        while True:
            values = {instance_id: client.get(f"{name}:instance:{instance_id}") for instance_id in processes}
            if all(values.values()):
                return {instance_id: decode_record(value) for instance_id, value in values.items()}
            for instance_id, process in processes.items():
                assert process.poll() is None, f"{instance_id} has ended: {logs[instance_id].read_text()}"
            assert time.monotonic() < deadline_s, {i: path.read_text() for i, path in logs.items()}
            time.sleep(0.05)  # a poll of other processes, bounded by the deadline above


class Proxy:
    """Talks to workers as a proxy does. Answers are kept per request until somebody asks for them."""

    def __init__(self, cluster: Cluster) -> None:
        self.records = cluster.records
        self.context = zmq.asyncio.Context()
        self.identity = f"p-{uuid.uuid4().hex[:8]}"
        self.text = TextProcessor(load_model_info("signpost"))
        self.clients = {
            i: WorkerClient(self.context, r.requests_address, self.identity) for i, r in self.records.items()
        }
        self.answers: list[FromWorker] = []
        self._tasks = [asyncio.create_task(self._receive(client)) for client in self.clients.values()]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.context.destroy(linger=0)

    async def _receive(self, client: WorkerClient) -> None:
        while True:
            self.answers.append(await client.receive())

    async def send(self, instance_id: str, *messages: ToWorker) -> None:
        for message in messages:
            self.clients[instance_id].send(message)

    async def answer(self, request_id: str, timeout_s: float = 30.0) -> str:
        """The text of a finished request; fails if it has failed."""
        await eventually(lambda: self._finished(request_id), timeout_s)
        ids = [token for message in self.tokens(request_id) for token in message.token_ids]
        return self.text.decode(ids)

    async def encoded(self, request_id: str, timeout_s: float = 30.0) -> Encoded:
        """The first reply of an encoder about a request."""
        await eventually(lambda: bool(self.of(request_id, Encoded)), timeout_s)
        return self.of(request_id, Encoded)[0]

    def tokens(self, request_id: str) -> list[Tokens]:
        return self.of(request_id, Tokens)

    def of(self, request_id: str, kind: type[Answer]) -> list[Answer]:
        """All answers of one kind about a request, in the order of arrival."""
        return [answer for answer in self.answers if isinstance(answer, kind) and answer.request_id == request_id]

    def _finished(self, request_id: str) -> bool:
        failures = self.of(request_id, Failed)
        assert not failures, failures
        return any(message.done for message in self.tokens(request_id))

    async def metrics(self, instance_id: str) -> dict[str, float]:
        """All samples of a worker's /metrics; labels are part of the name as in `name{outcome=stored}`."""
        async with httpx.AsyncClient() as http:
            page = (await http.get(f"{self.records[instance_id].http_address}/metrics")).text
        samples = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
                samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return samples

    async def status(self, instance_id: str, path: str) -> int:
        async with httpx.AsyncClient() as http:
            return (await http.get(f"{self.records[instance_id].http_address}{path}")).status_code

    async def is_idle(self) -> bool:
        """True if no worker holds anything of any request."""
        decoder, encoder = await self.metrics("d0"), await self.metrics("e0")
        held = [decoder[f"triptych_{name}"] for name in DECODER_HOLDS] + [
            encoder[f"triptych_{name}"] for name in ENCODER_HOLDS
        ]
        return not any(held)


DECODER_HOLDS = (
    "requests_running",
    "requests_waiting",
    "requests_outstanding",
    "kv_blocks_used",
    "encoder_cache_references",
    "inputs_pending",
    "early_offers",
    "inputs_granted",
    "channel_messages_waiting",
)
ENCODER_HOLDS = (
    "encoder_items_open",
    "encoder_items_computing",
    "encoder_held_bytes",
    "encoder_queue_items",
    "handoffs_open",
    "requests_outstanding",
    "preprocess_waiting",
)
