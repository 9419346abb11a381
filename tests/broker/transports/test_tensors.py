"""The facade of tensors: which transport is taken, what addresses say, what a header must say of its bytes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import zmq.asyncio
from redis.asyncio import Redis

from broker.transports.cuda import sender as cuda_transport
from broker.transports.factory import TransportContext
from broker.transports.linked import packets
from broker.transports.payload import DeviceBuffer
from broker.transports.tensors import TensorReceiver, TensorSender, addresses_by_scheme, change_hosts, payload_fault
from common.config import Transport
from common.errors import TriptychError
from tests.broker.transports.fake_cuda import FakeCuda
from tests.broker.transports.transport_kit import Kit, header, kit_of, of_bytes, to, transfer

ONE = memoryview(b"x")


@pytest.fixture
async def kit(redis: Redis, broker_url: str) -> AsyncIterator[Kit]:
    async with kit_of("auto", redis, broker_url) as kit:
        yield kit


async def test_on_one_host_tensors_go_through_shared_memory(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    assert list(addresses_by_scheme(receiver.address)) == ["tcp", "shm+unix"]
    assert (await transfer(sender, receiver, of_bytes(ONE), ONE)).data == ONE
    assert sender.num_sent == {"shm+unix": 1}
    assert not sender.num_fallbacks


@pytest.mark.parametrize("obstacle", ["another host", "another network", "another user"])
async def test_where_shared_memory_does_not_reach_zmq_is_taken_without_an_error(
    kit: Kit, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    host, _, name = addresses_by_scheme(receiver.address)["shm+unix"].partition("://")[2].partition("/")
    address = receiver.address
    if obstacle == "another host":
        address = address.replace(host, "00000000-0000-0000-0000-000000000000")
    elif obstacle == "another network":  # the name is not there
        address = address.replace(name, name[::-1])
    else:
        monkeypatch.setattr(packets.os, "geteuid", lambda: 4711)
    for number in range(1, 4):
        await sender.send(to(address), of_bytes(ONE), ONE, timeout_s=5)
        assert (await receiver.receive()).data == ONE
        assert sender.num_sent == {"tcp": number}
        assert sender.num_fallbacks == {"shm+unix": number}, "also those for which it was not tried again"


async def test_a_receiver_that_does_not_answer_on_shared_memory_gets_zmq_within_the_same_deadline(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else listens under the name, and says nothing."""
    monkeypatch.setattr("broker.transports.linked.sender.HANDSHAKE_S", 0.1)
    sender, receiver = kit.sender(), kit.receiver()
    silent = packets.listen("triptych-test-silent")
    name = addresses_by_scheme(receiver.address)["shm+unix"].rpartition("/")[2]
    await sender.send(to(receiver.address.replace(name, "triptych-test-silent")), of_bytes(ONE), ONE, timeout_s=5)
    assert (await receiver.receive()).data == ONE
    assert sender.num_sent == {"tcp": 1}
    silent.close()


@pytest.mark.parametrize("setting", ["auto", "cuda"])
async def test_what_lies_on_a_gpu_goes_from_there_to_the_receivers(kit: Kit, setting: Transport) -> None:
    with gpu_ends(kit, setting) as (sender, receiver, cuda):
        schemes = ["cuda+unix", "shm+unix", "tcp"]
        assert sorted(addresses_by_scheme(receiver.address)) == schemes
        received = await transfer(sender, receiver, of_bytes(ONE), cuda.upload(ONE))
        assert isinstance(received.data, DeviceBuffer)
        assert received.header.checksum == 0
        assert sender.num_sent == {"cuda+unix": 1}
        received.release()
        assert (await transfer(sender, receiver, of_bytes(ONE), ONE)).data == ONE
        assert sender.num_sent == {"cuda+unix": 1, "shm+unix": 1}, "what lies on the host goes as ever"
        assert not sender.num_fallbacks


@pytest.mark.parametrize("obstacle", ["a receiver on a CPU", "a GPU that cannot read ours", "too large"])
async def test_what_cannot_go_by_cuda_is_brought_to_the_host(
    kit: Kit, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = memoryview(os.urandom(5000))
    if obstacle == "too large":
        monkeypatch.setattr(cuda_transport, "ARENA_BYTES", 8192)
    with gpu_ends(kit, "auto", device_id="0000:02:00.0" if "cannot" in obstacle else None) as (sender, receiver, cuda):
        receiver = kit.receiver() if "CPU" in obstacle else receiver
        for number in range(1, 3):
            received = await transfer(sender, receiver, of_bytes(data), cuda.upload(data))
            assert received.fault is None
            assert received.data == data
            assert sender.num_sent == {"shm+unix": number}
            tried = {} if "CPU" in obstacle else {"cuda+unix": number}
            assert sender.num_fallbacks == {"gpu": number, **tried}
            received.release()


async def test_the_setting_cuda_brings_nothing_to_the_host(kit: Kit) -> None:
    with gpu_ends(kit, "cuda", device_id="0000:02:00.0") as (sender, receiver, cuda):
        with pytest.raises(TriptychError, match="no memory of a GPU with cuda") as caught:
            await sender.send(to(receiver.address), of_bytes(ONE), cuda.upload(ONE), timeout_s=5)
        assert caught.value.info.code == "unavailable"
        with pytest.raises(TriptychError, match="takes nothing by cuda"):
            await sender.send(to(kit.receiver().address), of_bytes(ONE), cuda.upload(ONE), timeout_s=5)
        assert not sender.num_sent


async def test_bytes_that_do_not_leave_the_gpu_in_time_cost_a_deadline(kit: Kit) -> None:
    leaving = threading.Event()
    with gpu_ends(kit, "auto") as (sender, _, _):
        stuck = DeviceBuffer(0, 1, _to_host=lambda: memoryview(b"x") if leaving.wait(60) else ONE)
        with pytest.raises(TriptychError, match="did not come from the GPU in time"):
            await sender.send(to(kit.receiver().address), of_bytes(ONE), stuck, timeout_s=0.05)
        leaving.set()


async def test_cuda_without_a_gpu_is_refused_with_a_remedy(kit: Kit) -> None:
    with pytest.raises(TriptychError, match="does not compute on a GPU"):
        TransportContext(kit.context, transport="cuda")


@contextmanager
def gpu_ends(
    kit: Kit, setting: Transport, device_id: str | None = None
) -> Iterator[tuple[TensorSender, TensorReceiver, FakeCuda]]:
    """A sender on a GPU, and a receiver on the same one, or on `device_id`; the fake is the sender's."""
    mine, other = FakeCuda(), FakeCuda() if device_id is None else FakeCuda(device_id)
    sender = TensorSender(TransportContext(kit.context, transport=setting, cuda=mine))
    receiver = TensorReceiver(TransportContext(kit.context, transport=setting, cuda=other), max_bytes=2**20)
    yield sender, receiver, mine
    sender.close()
    receiver.close()


async def test_a_setting_names_one_transport_for_both_sides(kit: Kit, redis: Redis, broker_url: str) -> None:
    async with kit_of("zmq", redis, broker_url) as zmq_only, kit_of("redis", redis, broker_url) as redis_only:
        everything = kit.receiver()
        sender = zmq_only.sender()
        await transfer(sender, everything, of_bytes(ONE), ONE)
        assert sender.num_sent == {"tcp": 1}  # as this sender is told, though there is shared memory
        sender = kit.sender()
        await transfer(sender, redis_only.receiver(), of_bytes(ONE), ONE)
        assert sender.num_sent == {"redis+list": 1}  # as this receiver is told
        with pytest.raises(TriptychError, match=r"takes tensors by redis\+list, this instance sends by tcp"):
            await zmq_only.sender().send(to(redis_only.receiver().address), of_bytes(ONE), ONE, timeout_s=5)


async def test_a_receiver_without_an_address_is_unavailable(kit: Kit) -> None:
    with pytest.raises(TriptychError, match="no transport") as caught:
        await kit.sender().send(to(""), of_bytes(ONE), ONE, timeout_s=5)
    assert caught.value.info.code == "unavailable"


async def test_a_receiver_that_is_not_there_is_unavailable_within_the_deadline(kit: Kit) -> None:
    began_s = time.monotonic()
    with pytest.raises(TriptychError, match="took none within") as caught:
        await kit.sender().send(to("tcp://127.0.0.1:1"), of_bytes(ONE), ONE, timeout_s=0.1)
    assert caught.value.info.code == "unavailable"
    assert time.monotonic() - began_s < 10.0


async def test_a_receiver_that_leaves_the_registry_ends_what_is_being_sent_to_it(kit: Kit) -> None:
    sender = kit.sender()
    sending = asyncio.create_task(sender.send(to("tcp://127.0.0.1:1"), of_bytes(ONE), ONE, timeout_s=60))
    await asyncio.sleep(0.05)
    sender.keep_only(())
    with pytest.raises(TriptychError, match="has gone") as caught:
        async with asyncio.timeout(10):
            await sending
    assert caught.value.info.code == "unavailable"


async def test_a_cancelled_send_is_cancelled(kit: Kit) -> None:
    sending = asyncio.create_task(kit.sender().send(to("tcp://127.0.0.1:1"), of_bytes(ONE), ONE, timeout_s=60))
    await asyncio.sleep(0.05)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_an_unknown_scheme_from_a_newer_version_is_passed_over(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    await sender.send(to(f"rdma+tcp://10.0.0.1:1 {receiver.address}"), of_bytes(ONE), ONE, timeout_s=5)
    assert (await receiver.receive()).data == ONE


async def test_redis_without_a_broker_is_refused_with_a_remedy() -> None:
    context = zmq.asyncio.Context()
    kit = Kit("redis", None, "", context)  # type: ignore[arg-type]
    for make in (kit.receiver, kit.sender):
        with pytest.raises(TriptychError, match="give --broker"):
            make()
    await kit.close()


async def test_receiving_can_be_cancelled_without_losing_a_tensor(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    for number in range(5):
        waiting = asyncio.create_task(receiver.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        data = memoryview(os.urandom(100 + number))
        assert (await transfer(sender, receiver, of_bytes(data), data)).data == data


def test_only_addresses_with_a_host_are_changed() -> None:
    addresses = "tcp://0.0.0.0:5 shm+unix://boot/name nixl+tcp://0.0.0.0:6 redis+list://c:tensors:1"
    changed = change_hosts(addresses, lambda address: address.replace("0.0.0.0", "worker-1"))
    assert changed == "tcp://worker-1:5 shm+unix://boot/name nixl+tcp://worker-1:6 redis+list://c:tensors:1"
    assert change_hosts("", lambda address: "x") == ""


def test_faults_name_the_numbers() -> None:
    assert payload_fault(header([2, 3], "bfloat16", 12), 12) is None
    assert payload_fault(header([0, 3], "float16", 0), 0) is None
    assert "24 bytes" in str(payload_fault(header([2, 3], "float32", 12), 12))
    assert "there are 5" in str(payload_fault(header([3], "uint8", 3), 5))
    assert "negative" in str(payload_fault(header([-2, -3], "float32", 24), 24))
    assert "beyond any memory" in str(payload_fault(header([0, 2**61, 2**61], "float32", 0), 0))
    assert "complex128" in str(payload_fault(header([1], "complex128", 16), 16))
