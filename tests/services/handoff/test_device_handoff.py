"""Encoder outputs and KV from GPU to GPU, between the services of two workers over a fake CUDA.

Both engines compute on the CPU; what is between them takes their tensors' memory for that of a GPU.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import torch
import zmq.asyncio
from redis.asyncio import Redis

from broker.handoff.sender import Key, key_of
from broker.transports.cuda import sender as cuda_transport
from broker.transports.cuda.runtime import CudaError
from broker.transports.factory import TransportContext
from broker.transports.payload import DeviceBuffer, Payload
from broker.transports.received import ReceivedTensor
from broker.transports.tensors import TensorSender
from common.config import Transport
from common.hashing import checksum
from common.messages import TensorHeader
from common.sampling_params import SamplingParams
from engine.core.decoder_engine import DecoderEngine
from engine.handoff.offer_check import KvPart
from engine.llm import LLM
from services.handoff.payloads import Outgoing, bytes_of, open_cuda, payload_of
from services.handoff.receive_buffers import DeviceReceiveBuffers
from services.handoff.receiver import MAX_DEVICE_PARTS
from services.roles.decoder import PrefillDecodeService
from services.roles.encoder import EncoderService
from tests.broker.transports.fake_cuda import FakeCuda
from tests.eventually import eventually
from tests.services.apart import apart, question
from tests.services.inprocess import InProcess, colour_seen, in_process
from tests.services.roles.test_decode import beside_a_prefill_worker

LONG = "Which colours does the sign have? " * 20


@dataclass
class Pair:
    """Encoder `e0` and decoder `d0`, each with a view of the same GPU."""

    encoder: InProcess[EncoderService]
    decoder: InProcess[PrefillDecodeService]
    gpus: dict[str, FakeCuda]

    async def ask(self, request_id: str, colour: str) -> str:
        return await colour_seen(self.encoder, self.decoder, request_id, colour)

    def sent(self) -> dict[str, int]:
        return self.encoder.tally("tensors_sent")


@pytest.fixture
async def pair(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    gpus = {"d0": FakeCuda(), "e0": FakeCuda()}
    starting, encoders = iter(gpus.values()), gpus["e0"]
    monkeypatch.setattr("services.worker_process.open_cuda", lambda device: next(starting))

    def on_the_gpu(tensor: torch.Tensor) -> DeviceBuffer:
        return encoders.upload(bytes_of(tensor))

    monkeypatch.setattr("services.encode.output_sink.payload_of", on_the_gpu)
    ends = broker_url, redis, zmq_context
    async with (
        in_process(*ends, PrefillDecodeService, instance_id="d0") as decoder,
        in_process(*ends, EncoderService, instance_id="e0") as encoder,
    ):
        yield Pair(encoder, decoder, gpus)
        assert decoder.gauge("integrity_failures") == 0


async def test_a_picture_goes_from_gpu_to_gpu_and_is_seen(pair: Pair) -> None:
    for number, colour in enumerate(("red", "blue", "green"), 1):
        assert (await pair.ask(colour, colour)).startswith(colour)
        assert pair.sent() == {"cuda+unix": number}
    await eventually(lambda: not pair.encoder.gauge("handoffs_open"))


async def test_what_is_too_large_for_the_arena_goes_through_the_host_and_lands_on_the_gpu(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_transport, "ARENA_BYTES", 128)
    assert (await pair.ask("r", "red")).startswith("red")
    assert pair.sent() == {"shm+unix": 1}


async def test_a_copy_that_fails_is_sent_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, failures = pair.gpus["d0"], [CudaError("cudaMemcpyAsync: a fault")]
    copy = cuda.copy

    def fail_once(target: int, source: int, num_bytes: int, stream: int) -> None:
        if failures and num_bytes > 16:  # not the greeting
            raise failures.pop()
        copy(target, source, num_bytes, stream)

    monkeypatch.setattr(cuda, "copy", fail_once)
    assert (await pair.ask("r", "red")).startswith("red")
    assert pair.sent() == {"cuda+unix": 2}
    assert not failures


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("signpost", num_threads=1, kv_cache_bytes=16 * 2**20)


@pytest.mark.parametrize(
    ("transport", "way"), [("auto", "cuda+unix"), ("nixl", "nixl+cuda+tcp"), ("shm", "shm+unix")], ids=str
)
async def test_keys_and_values_go_from_gpu_to_gpu(
    broker_url: str,
    redis: Redis,
    zmq_context: zmq.asyncio.Context,
    monkeypatch: pytest.MonkeyPatch,
    llm: LLM,
    transport: Transport,
    way: str,
) -> None:
    """By CUDA or NIXL, else through the host's memory; many parts, some of which leave while others are computed."""
    gpus = [FakeCuda(), FakeCuda()]
    starting = iter(gpus)
    monkeypatch.setattr("services.worker_process.open_cuda", lambda device: next(starting))
    monkeypatch.setattr("services.handoff.kv_sender.payload_of", lambda tensor: gpus[0].upload(bytes_of(tensor)))
    monkeypatch.setattr("services.handoff.kv_sender.tokens_per_part", lambda shape, dtype: 16)
    prompt, sampling = question(LONG), SamplingParams(max_tokens=6, temperature=0.0)
    [expected] = llm.generate({"prompt_token_ids": prompt}, sampling)
    async with apart(broker_url, redis, zmq_context, transport=transport) as workers:
        await workers.generate("r", prompt, sampling)
        assert await workers.tokens("r") == {0: expected.outputs[0].token_ids}
        assert (await workers.prefilled("r")).error is None
        assert workers.prefill.tally("tensors_sent") == {way: -(-(len(prompt) - 1) // 16)}
        assert (await workers.counts(workers.decode))["recomputed_tokens_total"] == 0


async def test_a_part_that_could_not_be_copied_to_the_gpu_comes_again(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeCuda()
    monkeypatch.setattr("services.worker_process.open_cuda", lambda device: gpu)
    async with beside_a_prefill_worker(broker_url, redis, zmq_context) as setting:
        cuda, worker = FakeCuda(), setting.worker
        offer = await setting.granted("r")
        size_bytes = offer.num_tokens * setting.token_bytes
        epoch, whole = (await worker.record()).epoch, [offer.num_tokens, *setting.token_shape]
        header = TensorHeader(*key_of(offer), "peer", epoch, whole, "float32", size_bytes, table="self")
        sender = TensorSender(TransportContext(zmq_context, cuda=cuda))
        failures, copy = [CudaError("a fault")], gpu.copy

        def fail_once(target: int, source: int, num_bytes: int, stream: int) -> None:
            if failures and num_bytes == size_bytes:
                raise failures.pop()
            copy(target, source, num_bytes, stream)

        monkeypatch.setattr(gpu, "copy", fail_once)
        for number, status in enumerate(("corrupt", "stored"), 1):
            await sender.send(await worker.record(), header, cuda.upload(bytes(size_bytes)), 5.0)
            assert await setting.receipt("r", number) == (0, status)
        assert sender.num_sent == {"cuda+unix": 2}
        await setting.done("r")
        sender.close()


async def test_keys_and_values_are_on_the_gpu_before_the_engine_hears_of_them_and_no_more_than_a_few(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, landed, delivered, going_on = FakeCuda(), list[str](), list[str](), threading.Event()
    receive, deliver = DeviceReceiveBuffers.receive, DecoderEngine.deliver_kv

    async def noted_receive(landing: DeviceReceiveBuffers, key: Key, received: ReceivedTensor) -> torch.Tensor | str:
        tensor = await receive(landing, key, received)
        landed.append(key[0])
        return tensor

    def noted_deliver(engine: DecoderEngine, request_id: str, attempt: int, part: KvPart) -> None:
        assert request_id in landed
        delivered.append(request_id)
        deliver(engine, request_id, attempt, part)

    monkeypatch.setattr("services.worker_process.open_cuda", lambda device: cuda)
    monkeypatch.setattr(DeviceReceiveBuffers, "receive", noted_receive)
    monkeypatch.setattr(DecoderEngine, "deliver_kv", noted_deliver)
    async with beside_a_prefill_worker(broker_url, redis, zmq_context) as setting:
        names = [f"r{number}" for number in range(MAX_DEVICE_PARTS + 2)]
        offers = [await setting.granted(name) for name in names]
        setting.worker.role.thread.submit(lambda engine: going_on.wait(60))  # a long step
        for offer in offers:
            await setting.send(offer, 0, 0, offer.num_tokens)
        await eventually(lambda: len(landed) == MAX_DEVICE_PARTS)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert (landed, delivered) == (names[:MAX_DEVICE_PARTS], [])
        going_on.set()
        for name in names:
            await setting.done(name)
        assert delivered == landed == names


# --- the parts


@pytest.mark.parametrize("way", ["the GPU", "the host"])
async def test_a_tensor_lands_complete_whatever_way_it_has_come(way: str) -> None:
    cuda, values = FakeCuda(), torch.arange(12, dtype=torch.float32).view(3, 4)
    landing, key = DeviceReceiveBuffers(cuda, torch.device("cpu")), ("r", 0, 0)
    header = TensorHeader(*key, "e0", 1, [3, 4], "float32", 48, checksum=checksum(bytes_of(values)))
    data: Payload = cuda.upload(bytes_of(values)) if way == "the GPU" else bytes_of(values)
    landed = await landing.receive(key, ReceivedTensor(header, data))
    assert isinstance(landed, torch.Tensor)
    assert torch.equal(landed, values)


async def test_bytes_damaged_on_the_host_do_not_land() -> None:
    landing, key = DeviceReceiveBuffers(FakeCuda(), torch.device("cpu")), ("r", 0, 0)
    header = TensorHeader(*key, "e0", 1, [4], "float32", 16, checksum=1)
    assert "damaged" in str(await landing.receive(key, ReceivedTensor(header, memoryview(bytes(16)))))


def test_outputs_on_the_host_are_sent_as_they_are() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert Outgoing(0).keep(tensor).data_ptr() == tensor.data_ptr()
    assert payload_of(tensor) == bytes_of(tensor)
    assert Outgoing(0).keep(tensor.T).is_contiguous()


def test_a_worker_on_a_cpu_has_no_cuda() -> None:
    assert open_cuda("cpu") is None
