"""A prefill and a decode worker in the test's own process, and a proxy that speaks to both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import zmq.asyncio
from redis.asyncio import Redis

from common.messages import Abort, Generate, InputSlot, Prefilled, Tokens
from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from common.text.processor import TextProcessor
from services.roles.decoder import DecodeService
from services.roles.prefill import PrefillService
from tests.eventually import eventually
from tests.services.inprocess import InProcess, in_process

HELD_BY_ENGINES = ("requests_running", "requests_waiting", "kv_blocks_used", "kv_host_blocks_used")
HELD_BY_ENGINES += ("encoder_cache_references", "inputs_pending", "inputs_granted", "kv_offers_pending")
HELD_BY_ENGINES += ("kv_reserved_requests", "early_offers")


@dataclass
class Apart:
    """Prefill worker `p0` and decode worker `d0`."""

    prefill: InProcess[PrefillService]
    decode: InProcess[DecodeService]

    async def generate(self, request_id: str, prompt: list[int], sampling: SamplingParams, **more: Any) -> None:
        """Send a request to both workers."""
        await self.decode_only(request_id, prompt, sampling, **more)
        await self.prefill_only(request_id, prompt, sampling, **more)

    async def prefill_only(self, request_id: str, prompt: list[int], sampling: SamplingParams, **more: Any) -> None:
        """Send a request to the prefill worker."""
        self.prefill.proxy.send(make_generate(request_id, prompt, sampling, prefill_for="d0", **more))

    async def decode_only(self, request_id: str, prompt: list[int], sampling: SamplingParams, **more: Any) -> None:
        """Send a request to the decode worker."""
        self.decode.proxy.send(make_generate(request_id, prompt, sampling, prefilled=True, **more))

    async def abort(self, request_id: str) -> None:
        for worker in (self.decode, self.prefill):
            worker.proxy.send(Abort(request_id))

    async def ended(self, request_id: str) -> None:
        """Return once the request's last tokens are there."""
        await eventually(lambda: any(message.done for message in self.decode.of(Tokens, request_id)), 30.0)

    async def tokens(self, request_id: str) -> dict[int, list[int]]:
        """All tokens of a request that has begun here, by sequence, once it has ended."""
        await self.ended(request_id)
        found: dict[int, list[int]] = {}
        for message in self.decode.of(Tokens, request_id):
            assert message.offset == len(found.setdefault(message.index, []))
            found[message.index].extend(message.token_ids)
        return found

    async def prefilled(self, request_id: str) -> Prefilled:
        return await self.prefill.one(Prefilled, request_id)

    async def counts(self, worker: InProcess[Any]) -> dict[str, float]:
        """The engine's own numbers."""
        return dict(await worker.role.thread.call(lambda engine: engine.stats(), 5.0))

    async def is_idle(self) -> bool:
        """True if neither worker holds anything of any request."""
        for worker in (self.prefill, self.decode):
            stats = await self.counts(worker)
            if any(stats[name] for name in HELD_BY_ENGINES) or worker.gauge("requests_outstanding"):
                return False
        return not (self.prefill.gauge("prefills_open") or self.prefill.gauge("handoffs_open"))


@asynccontextmanager
async def apart(
    broker_url: str,
    redis: Redis,
    context: zmq.asyncio.Context,
    *,
    prefill_engine: dict[str, Any] | None = None,
    decode_engine: dict[str, Any] | None = None,
    encoder_fallback: bool = False,
    **settings: Any,
) -> AsyncIterator[Apart]:
    """Run both workers with `settings` for the length of the block; they must end idle, with their books in order."""
    async with (
        in_process(
            broker_url,
            redis,
            context,
            PrefillService,
            instance_id="p0",
            engine=prefill_engine,
            encoder_fallback=encoder_fallback,
            **settings,
        ) as prefill,
        in_process(
            broker_url, redis, context, DecodeService, instance_id="d0", engine=decode_engine, **settings
        ) as decode,
    ):
        workers = Apart(prefill, decode)
        yield workers
        if not (prefill.task.done() or decode.task.done()):
            await eventually(workers.is_idle, 10.0)
        assert prefill.gauge("integrity_failures") == decode.gauge("integrity_failures") == 0


def make_generate(
    request_id: str, prompt: list[int], sampling: SamplingParams, inputs: list[InputSlot] | None = None, **more: Any
) -> Generate:
    return Generate(request_id, prompt, inputs or [], sampling, **more)


def question(text: str) -> list[int]:
    return TextProcessor(load_model_info("signpost")).render_chat([{"role": "user", "content": text}])
