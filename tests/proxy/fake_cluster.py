"""A cluster of fake workers: tensors move by method calls, messages and the registry are real."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio
from redis.asyncio import Redis

from common.model_info import ModelInfo
from common.text.processor import TextProcessor
from tests.proxy.fake_decoders import FakeDecoder, FakePrefill, FakeReader
from tests.proxy.fake_workers import FakeEncoder, FakeWorker


@dataclass
class FakeCluster:
    """Workers of one model. `decoders` are all that generate, whether they prefill or not."""

    redis: Redis
    info: ModelInfo
    text: TextProcessor
    name: str
    context: zmq.asyncio.Context
    encoders: list[FakeEncoder] = field(default_factory=list)
    prefills: list[FakePrefill] = field(default_factory=list)
    decoders: list[FakeDecoder] = field(default_factory=list)

    async def add_encoder(self) -> FakeEncoder:
        encoder = FakeEncoder(self, "encoder", f"e{len(self.encoders)}")
        self.encoders.append(encoder)
        await encoder.start()
        return encoder

    async def add_prefill(self, **record: Any) -> FakePrefill:
        prefill = FakePrefill(self, "prefill", f"p{len(self.prefills)}")
        self.prefills.append(prefill)
        await prefill.start(**record)
        return prefill

    async def add_decoder(self, name: str = "pd", **record: Any) -> FakeDecoder:
        """`name` is the role as topologies have it: pd, d, or epd."""
        roles = {"pd": "prefill_decode", "d": "decode", "epd": "encode_prefill_decode"}
        decoder = FakeDecoder(self, roles[name], f"{name}{len(self.decoders)}")
        self.decoders.append(decoder)
        await decoder.start(**record)
        return decoder

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.encoders, *self.prefills, *self.decoders]

    def reader(self, instance_id: str) -> FakeReader | None:
        """A live worker that takes inputs, or prompts."""
        readers = [*self.prefills, *self.decoders]
        return next((worker for worker in readers if worker.id == instance_id and worker.alive), None)

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.die()


@asynccontextmanager
async def fake_cluster(redis: Redis, info: ModelInfo, name: str) -> AsyncIterator[FakeCluster]:
    context = zmq.asyncio.Context()
    cluster = FakeCluster(redis, info, TextProcessor(info), name, context)
    try:
        yield cluster
    finally:
        await cluster.stop()
        context.destroy(linger=0)
