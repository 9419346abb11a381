"""What gets past the parser: well-formed messages whose values make no sense. A worker takes them or refuses them, goes
on serving, and holds nothing of them afterwards."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from redis.asyncio import Redis

from broker.handoff.channels import stream_key
from broker.transports.factory import TransportContext
from broker.transports.tensors import TensorSender
from common.messages import (
    KV_INPUT_ID,
    Abort,
    Generate,
    InputLayout,
    KvOffer,
    Offer,
    Resumed,
    StopSequence,
    TensorHeader,
    Tokens,
    encode,
    make_decode,
)
from common.sampling_params import SamplingParams
from services.roles.decoder import DecodeService, PrefillDecodeService
from tests.broker.conftest import zmq_context as zmq_context
from tests.eventually import eventually
from tests.security.mutations import revalued
from tests.services.apart import HELD_BY_ENGINES, question
from tests.services.inprocess import CLUSTER, InProcess, in_process

MESSAGES = 600
decode_header = make_decode(TensorHeader)
IDS = [f"r{number}" for number in range(6)]
PROMPT = question("Which colours does the sign have?")


def originals(shape: list[int]) -> list[Any]:
    """Messages that mean something to the worker, about few requests, so that they meet."""
    sampling = SamplingParams(
        max_tokens=3, temperature=0.5, seed=1, stop_token_ids=(5,), logit_bias={5: 1.0}, logprobs=1
    )
    deadline_s = time.monotonic() + 5
    found: list[Any] = []
    for request_id in IDS:
        kv = (len(PROMPT) - 1, 0, shape, [], "float32", [], 1, 0, "peer", deadline_s)
        layout = InputLayout(16, [(7, 16)], (1, 4, 4))
        found += [
            Generate(request_id, PROMPT, [], sampling),
            Generate(request_id, PROMPT, [], sampling, prefilled=True),
            Generate(request_id, PROMPT, [], sampling, resumed=[Resumed(0, [5, 6])]),
            KvOffer(request_id, 0, *kv),
            Offer(request_id, 0, 0, "h", "image", [16, 192], "float32", 12288, layout, "peer", deadline_s),
            StopSequence(request_id, 0),
            Abort(request_id),
            TensorHeader(request_id, 0, 0, "peer", 7, [16, 192], "float32", 12288),
            TensorHeader(request_id, 1_000_000, 0, "peer", 7, [4, *shape], "float32", 64, 0, 0, "self", 0),
        ]
    return found


@pytest.mark.parametrize("role", [PrefillDecodeService, DecodeService])
async def test_a_worker_outlives_messages_that_make_no_sense(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, role: Any
) -> None:
    rng = random.Random(7)
    async with in_process(broker_url, redis, zmq_context, role, handoff_timeout_s=1.0) as worker:
        shape = await worker.role.thread.call(lambda engine: list(engine.kv_receiver.offer_check.token_shape), 5.0)
        sender = TensorSender(TransportContext(zmq_context))
        greedy = SamplingParams(max_tokens=2**63, n=2**63, beam_width=2**63)  # three of them: no number of 64 bits
        for request_id in IDS[:3]:
            worker.proxy.send(Generate(request_id, PROMPT, [], greedy))
        messages = originals(shape)
        for _ in range(MESSAGES):
            message = rng.choice(messages)
            await send(worker, redis, sender, message, revalued(rng, encode(message)))
        for request_id in IDS:
            worker.proxy.send(Abort(request_id))
        worker.proxy.send(Generate("honest", PROMPT, [], SamplingParams(max_tokens=4, temperature=0.0)))
        if role is PrefillDecodeService:
            await eventually(lambda: any(tokens.done for tokens in worker.of(Tokens, "honest")), 30.0)
        worker.proxy.send(Abort("honest"))
        await eventually(lambda: is_idle(worker), 30.0)
        assert worker.gauge("integrity_failures") == 0
        assert not worker.task.done()
        sender.close()


async def test_an_input_under_the_number_of_keys_and_values_is_refused(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    """Else its tensor would be written as a part of them."""
    async with in_process(broker_url, redis, zmq_context, DecodeService) as worker:
        sender, layout = TensorSender(TransportContext(zmq_context)), InputLayout(16, [(7, 16)], (1, 4, 4))
        sizes = [16, 192], "float32", 12288
        offer = Offer("r", KV_INPUT_ID, 0, "h", "image", *sizes, layout, "peer", time.monotonic() + 5)
        header = TensorHeader("r", KV_INPUT_ID, 0, "peer", 7, *sizes)
        await worker.record()
        await send(worker, redis, sender, offer, encode(offer))
        await eventually(lambda: worker.tally("handoffs").get("refused") == 1)
        await send(worker, redis, sender, header, encode(header))
        await eventually(lambda: worker.tally("handoffs").get("receipt_cancelled") == 1)
        assert not worker.task.done()
        sender.close()


async def send(worker: InProcess[Any], redis: Redis, sender: TensorSender, message: Any, data: bytes) -> None:
    """By the way that this kind of message takes. Values that are no message end at the parser, which others test."""
    if isinstance(message, Offer | KvOffer):
        await redis.xadd(stream_key(CLUSTER, "w0", "metadata"), {b"m": data})
    elif isinstance(message, TensorHeader):
        try:
            header = decode_header(data)
        except ValueError:
            return
        record = await worker.record()
        payload = memoryview(bytes(header.size_bytes % 65536))
        await sender.send(record, msgspec.structs.replace(header, receiver_epoch=record.epoch), payload, 5.0)
    else:
        await worker.proxy._socket.send(data)


async def is_idle(worker: InProcess[Any]) -> bool:
    stats = await worker.role.thread.call(lambda engine: engine.stats(), 5.0)
    return not any(stats[name] for name in HELD_BY_ENGINES) and not worker.gauge("requests_outstanding")
