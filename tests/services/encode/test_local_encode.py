"""Workers that encode for themselves: the one-process form, and the fallback where there is no encoder."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import zmq.asyncio
from redis.asyncio import Redis

from common.messages import Abort, Encoded
from common.sampling_params import SamplingParams
from engine.llm import LLM
from services.encode import local_encode
from services.handoff.payloads import compute_on_own_stream
from services.roles.decoder import DecoderService, EncodePrefillDecodeService, PrefillDecodeService
from services.worker_context import WorkerContext
from tests.eventually import eventually
from tests.services.apart import HELD_BY_ENGINES
from tests.services.cluster import about_pictures, encode_order, sign
from tests.services.inprocess import InProcess, in_process

TEXT = "What colour is the sign?"
HELD = ("requests_outstanding", "encoder_items_open", "encoder_items_computing", "encoder_held_bytes")
HELD += ("inputs_encoding_here",)


class Setting:
    """A worker `w0`, and a proxy that asks it about pictures."""

    def __init__(self, worker: InProcess[DecoderService]) -> None:
        self.worker = worker

    async def generate(self, request_id: str, media: list[bytes], max_tokens: int = 8) -> None:
        self.worker.proxy.send(about_pictures(request_id, media, TEXT, max_tokens))

    async def encode(self, request_id: str, input_id: int, media: bytes, *, to: str = "w0", **changes: Any) -> None:
        self.worker.proxy.send(encode_order(request_id, input_id, media, to=to, **changes))

    async def is_idle(self) -> bool:
        stats = await self.worker.role.thread.call(lambda engine: engine.stats(), 5.0)
        return not any(stats[name] for name in HELD_BY_ENGINES) and not any(map(self.worker.gauge, HELD))


@asynccontextmanager
async def serving(
    broker_url: str,
    redis: Redis,
    context: zmq.asyncio.Context,
    role: Callable[[WorkerContext], DecoderService] = EncodePrefillDecodeService,
    **settings: bool,
) -> AsyncIterator[Setting]:
    async with in_process(broker_url, redis, context, role, **settings) as worker:
        setting = Setting(worker)
        yield setting
        await eventually(setting.is_idle)
        assert worker.gauge("integrity_failures") == 0


@pytest.mark.parametrize("encoder_fallback", [False, True], ids=["plain", "with the fallback"])
async def test_one_process_answers_as_llm_does_and_hands_nothing_over(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, encoder_fallback: bool
) -> None:
    media = [sign("red"), sign("blue", size=168)]
    llm = LLM("signpost", num_threads=1, kv_cache_bytes=16 * 2**20)
    content = [*({"type": "image", "image": item} for item in media), {"type": "text", "text": TEXT}]
    [expected] = llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=8, temperature=0.0))
    async with serving(broker_url, redis, zmq_context, encoder_fallback=encoder_fallback) as setting:
        record = await setting.worker.record()
        assert (record.role, record.encodes) == ("encode_prefill_decode", True)
        await setting.generate("r", media)
        for input_id, item in enumerate(media):
            await setting.encode("r", input_id, item)
        assert await setting.worker.token_ids("r") == expected.outputs[0].token_ids
        await eventually(lambda: len(setting.worker.of(Encoded, "r")) == 2)
        replies = setting.worker.of(Encoded, "r")
        assert all(reply.error is None for reply in replies)
        assert [span.stage for span in replies[0].spans] == ["preprocess", "grant", "encode", "handoff"]
        assert setting.worker.tally("handoffs") == {}
        assert setting.worker.gauge("encoder_fallbacks_total") == 0
        await setting.generate("again", media)
        for input_id, item in enumerate(media):
            await setting.encode("again", input_id, item)
        assert await setting.worker.token_ids("again") == expected.outputs[0].token_ids
        stages = {span.stage for reply in setting.worker.of(Encoded, "again") for span in reply.spans}
        assert "encode" not in stages  # the content is here already


async def test_the_encoder_computes_on_its_own_stream_and_the_decoder_keeps_what_it_gets_for_its_own(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which thread: streams are a thread's."""
    encoders: list[int] = []
    decoders: list[tuple[int, torch.Size]] = []
    monkeypatch.setattr(local_encode, "compute_on_own_stream", lambda _: encoders.append(threading.get_ident()))

    def keep(tensor: torch.Tensor) -> None:
        decoders.append((threading.get_ident(), tensor.shape))

    monkeypatch.setattr(local_encode, "keep_for_this_stream", keep)
    async with serving(broker_url, redis, zmq_context) as setting:
        await setting.generate("r", [sign("red")])
        await setting.encode("r", 0, sign("red"))
        await setting.worker.token_ids("r")
        own = await setting.worker.role.thread.call(lambda engine: threading.get_ident(), 5.0)
    assert [thread for thread, _ in decoders] == [own]
    assert len(encoders) == 1
    assert own not in encoders


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_only_a_gpu_has_streams(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "set_stream", taken.append)
    compute_on_own_stream(torch.device(kind))
    assert taken == (["a stream of cuda"] if kind == "cuda" else [])


async def test_every_end_of_an_item_leaves_nothing(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    async with serving(broker_url, redis, zmq_context) as setting:
        await setting.generate("aborted", [sign("red")])
        await setting.encode("aborted", 0, sign("red"))
        setting.worker.proxy.send(Abort("aborted"))
        await eventually(setting.is_idle)
        await setting.encode("aborted", 0, sign("red"), attempt=1)  # too late for anybody
        assert await _error(setting, "aborted") == "unavailable"
        await setting.encode("never", 0, sign("red"), timeout_s=0.5)  # whose request does not come
        assert await _error(setting, "never") in ("timeout", "unavailable")
        await setting.encode("broken", 0, b"no picture")
        assert await _error(setting, "broken") == "bad_media"


async def test_without_an_encoder_a_decoder_worker_may_encode_and_counts_it(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    async with serving(broker_url, redis, zmq_context, PrefillDecodeService, encoder_fallback=True) as setting:
        assert (await setting.worker.record()).encodes
        await setting.generate("r", [sign("red")])
        await setting.encode("r", 0, sign("red"))
        assert (await setting.worker.text("r")).startswith("red")
        assert setting.worker.gauge("encoder_fallbacks_total") == 1
        await setting.encode("elsewhere", 0, sign("red"), to="d7")
        assert await _error(setting, "elsewhere") == "invalid_request"


async def test_without_the_setting_it_does_not(broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context) -> None:
    async with in_process(broker_url, redis, zmq_context, PrefillDecodeService) as worker:
        assert not (await worker.record()).encodes
        setting = Setting(worker)
        await setting.encode("r", 0, sign("red"))
        assert await _error(setting, "r") == "invalid_request"


async def _error(setting: Setting, request_id: str) -> str:
    error = (await setting.worker.one(Encoded, request_id)).error
    assert error is not None
    return error.code
