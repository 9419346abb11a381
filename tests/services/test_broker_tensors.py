"""Workers whose tensors go through the broker tell lives of a sender apart, and give up on those that are over."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq.asyncio
from redis.asyncio import Redis

from broker.transports.redis_wire import Passing, decode_passing
from common.errors import TriptychError
from common.messages import encode
from services.decoder import DecoderService
from services.prefill import PrefillService
from services.prefill_decode import PrefillDecodeService
from tests.broker.transport_kit import of_bytes, to
from tests.eventually import eventually
from tests.services.inprocess import CLUSTER, Peer, in_process


@pytest.mark.parametrize("role", [PrefillService, PrefillDecodeService])
async def test_a_worker_forgets_a_tensor_whose_sender_has_started_anew(
    role: type[DecoderService], broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    async with in_process(broker_url, redis, zmq_context, role, transport="redis") as worker:
        record = await worker.record()
        announced = record.tensor_address.partition("://")[2]
        peer = Peer(redis, zmq_context, record, "encoder")
        header = of_bytes(b"x", sender=peer.instance_id)
        passing = Passing("0f" * 8, 1, 30.0, header, peer.record.epoch, announced)
        await redis.rpush(announced, encode(passing))
        await redis.rpush(announced, encode(msgspec.structs.replace(passing, id="1e" * 8, sender_epoch=0)))
        async with peer.alive():
            await eventually(lambda: worker.gauge("tensors_unfinished_total") == 1)  # the younger one may come yet
            await redis.rpush(f"{announced}:{passing.id}:0", b"x")
            await eventually(lambda: worker.tally("handoffs").get("receipt_cancelled") == 1)  # nobody waits for it
        await redis.delete(f"{announced}:{passing.id}:taken")
    assert worker.gauge("tensors_unfinished_total") == 1


async def test_a_worker_says_in_which_life_it_sends(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    async with in_process(broker_url, redis, zmq_context, PrefillDecodeService, transport="redis") as worker:
        sender, announced = worker.shell._links.tensor_sender(), f"{CLUSTER}:tensors:nobody"
        sending = asyncio.create_task(
            sender.send(to(f"redis+list://{announced}"), of_bytes(b"x"), memoryview(b"x"), 1.0)
        )
        async with asyncio.timeout(20):
            _, passing = await redis.blpop([announced])
        assert decode_passing(passing).sender_epoch == (await worker.record()).epoch
        with pytest.raises(TriptychError):
            await sending
