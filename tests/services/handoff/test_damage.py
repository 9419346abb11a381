"""A byte that is damaged on its way, by any transport, is noticed and costs a repetition: the tokens are right."""

from __future__ import annotations

import msgspec
import pytest
import zmq.asyncio
from redis.asyncio import Redis

from broker.transports.received import PushTarget, ReceivedTensor
from broker.transports.tensors import TensorReceiver
from common.config import Transport
from common.sampling_params import SamplingParams
from engine.llm import LLM
from services.roles.decoder import PrefillDecodeService
from services.roles.encoder import EncoderService
from tests.broker.transports.transport_kit import NIXL
from tests.services.apart import apart, question
from tests.services.inprocess import colour_seen, in_process

TRANSPORTS = ["zmq", "shm", "redis", NIXL]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("signpost", num_threads=1, kv_cache_bytes=16 * 2**20)


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One bit of the first tensor flips in the receiver's memory, before anybody has looked at it there: its size."""
    sizes: list[int] = []
    receive, read_to = TensorReceiver.receive, PushTarget.read_to

    async def receive_damaged(receiver: TensorReceiver) -> ReceivedTensor:
        received = await receive(receiver)
        if sizes:
            return received
        sizes.append(received.header.size_bytes)
        data = bytearray(received.data)
        data[len(data) // 2] ^= 0x10
        return msgspec.structs.replace(received, data=memoryview(data))

    def read_damaged(room: PushTarget, end: int) -> None:
        if not sizes and room.memory is not None and end:
            sizes.append(room.header.size_bytes)
            room.memory[0] ^= 0x10
        read_to(room, end)

    monkeypatch.setattr(TensorReceiver, "receive", receive_damaged)
    monkeypatch.setattr(PushTarget, "read_to", read_damaged)
    return sizes


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_part_of_a_prompt_is_sent_again(
    broker_url: str,
    redis: Redis,
    zmq_context: zmq.asyncio.Context,
    llm: LLM,
    damaged: list[int],
    transport: Transport,
) -> None:
    prompt = question("Which colours does the sign have? " * 20)
    [reference] = llm.generate({"prompt_token_ids": prompt}, GREEDY)
    async with apart(broker_url, redis, zmq_context, transport=transport) as workers:
        await workers.generate("r", prompt, GREEDY)
        assert await workers.tokens("r") == {0: reference.outputs[0].token_ids}
        assert (await workers.prefilled("r")).error is None
        assert damaged
        assert workers.prefill.tally("kv_handoffs") == {"sent_again": 1, "stored": 1}
        assert workers.decode.tally("handoffs")["receipt_corrupt"] == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_encoders_output_is_sent_again(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, damaged: list[int], transport: Transport
) -> None:
    async with (
        in_process(broker_url, redis, zmq_context, EncoderService, instance_id="e0", transport=transport) as encoder,
        in_process(
            broker_url, redis, zmq_context, PrefillDecodeService, instance_id="d0", transport=transport
        ) as decoder,
    ):
        assert (await colour_seen(encoder, decoder, "r", "red")).startswith("red")
        assert damaged
        assert encoder.tally("handoffs")["sent_again"] == 1
        assert decoder.tally("handoffs")["receipt_corrupt"] == 1
