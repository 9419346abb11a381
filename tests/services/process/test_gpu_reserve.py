"""How much of a GPU engines leave to what tensors travel by."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq.asyncio
from redis.asyncio import Redis

from broker.transports.factory import TransportContext, gpu_bytes_of_nixl
from broker.transports.nixl import agent as nixl_agent
from broker.transports.tensors import TensorReceiver, TensorSender
from common.config import EngineConfig, Settings, Transport
from common.process.gpu_memory import PROCESS_BYTES
from services.process.gpu_reserve import engine_on_gpu
from services.roles.decoder import PrefillDecodeService
from services.roles.encoder import EncoderService
from tests.broker.transports.device_ends import DEVICE_SCHEMES
from tests.broker.transports.fake_cuda import FakeCuda
from tests.services.inprocess import in_process

MIB = 2**20


@pytest.mark.parametrize(
    ("transport", "installed", "rdma", "sends", "takes"),
    [
        ("nixl", True, False, 64, 128),
        ("auto", True, True, 64, 128),
        ("auto", True, False, 64, 0),  # a receiver elsewhere may have RDMA, and offer it
        ("auto", False, True, 0, 0),
        ("cuda", True, True, 0, 128),
        ("cuda", True, False, 0, 0),
        ("shm", True, True, 0, 0),
        ("zmq", True, True, 0, 0),
    ],
)
async def test_nixl_counts_where_it_may_carry_what_lies_on_a_gpu(
    zmq_context: zmq.asyncio.Context,
    monkeypatch: pytest.MonkeyPatch,
    transport: Transport,
    installed: bool,
    rdma: bool,
    sends: int,
    takes: int,
) -> None:
    """What is expected is in MiB."""
    monkeypatch.setattr(nixl_agent, "module_name", lambda: "nixl_cu13" if installed else None)
    monkeypatch.setattr(nixl_agent, "has_rdma", lambda host: rdma)
    assert gpu_bytes_of_nixl(transport, "10.0.0.5") == (sends + takes) * MIB
    engine = engine_on_gpu(Settings(transport=transport), "10.0.0.5")
    assert engine.process_bytes == PROCESS_BYTES + (sends + takes) * MIB
    if transport != "nixl":  # which would start the library
        receiver = TensorReceiver(TransportContext(zmq_context, transport=transport, cuda=FakeCuda()), max_bytes=MIB)
        sender = TensorSender(TransportContext(zmq_context, transport=transport, cuda=FakeCuda()))
        assert (DEVICE_SCHEMES["nixl+cuda"] in receiver.address) == (takes > 0)
        assert (DEVICE_SCHEMES["nixl+cuda"] in sender._devices) == (sends > 0)
        receiver.close()
        sender.close()


def test_what_the_user_says_a_process_takes_is_kept() -> None:
    settings = Settings(transport="nixl", engine=EngineConfig(process_bytes=7))
    assert engine_on_gpu(settings, "127.0.0.1") == settings.engine


@pytest.mark.parametrize("on_gpu", [True, False])
async def test_engines_are_told_of_it_where_there_is_a_gpu(
    broker_url: str,
    redis: Redis,
    zmq_context: zmq.asyncio.Context,
    monkeypatch: pytest.MonkeyPatch,
    on_gpu: bool,
) -> None:
    monkeypatch.setattr("services.worker_process.open_cuda", lambda device: FakeCuda() if on_gpu else None)
    monkeypatch.setattr("services.process.gpu_reserve.gpu_bytes_of_nixl", lambda transport, host: 5)
    told: list[int | None] = []

    def noted(engine: type[Any]) -> Any:
        def make(info: Any, config: EngineConfig, *more: Any) -> Any:
            told.append(config.process_bytes)
            return engine(info, config, *more)

        return make

    from services.encode import encode_stage as encoding
    from services.roles import decoder

    monkeypatch.setattr(decoder, "DecoderEngine", noted(decoder.DecoderEngine))
    monkeypatch.setattr(encoding, "EncoderEngine", noted(encoding.EncoderEngine))
    for role in (PrefillDecodeService, EncoderService):
        async with asyncio.timeout(120), in_process(broker_url, redis, zmq_context, role):
            pass
    assert told == 2 * [PROCESS_BYTES + 5 if on_gpu else None]
