"""What the runner sends between host and device arrives as it was, and so do blocks that are moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cache.block_manager import BlockMove
from engine.device.h2d import ALIGNMENT, Array, pack, send, send_tensor, unpack
from engine.runner.last_tokens import LastTokens
from engine.runner.moves import copy_runs, move_blocks, read_tokens, write_tokens
from engine.state.inputs import Staging

CPU = torch.device("cpu")
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ("cpu", pytest.param("cuda", marks=needs_gpu))


def some_arrays() -> list[Array]:
    """Of several types, sizes and strides, an empty one among them."""
    numbers = np.arange(24, dtype=np.int64).reshape(4, 6)
    return [
        numbers,
        numbers[:, ::2],
        np.arange(5) > 2,
        np.zeros((0, 3), np.int64),
        np.arange(7, dtype=np.int32),
        np.linspace(0, 1, 3, dtype=np.float32),
    ]


def test_arrays_that_travel_in_one_buffer_come_out_as_they_were() -> None:
    arrays = some_arrays()
    buffer = pack(arrays, pin=False)
    for array, tensor in zip(arrays, unpack(buffer.clone(), arrays), strict=True):
        assert tensor.dtype == torch.from_numpy(array[:0]).dtype
        assert tensor.data_ptr() % ALIGNMENT == 0 or not tensor.numel()
        np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_arrive_with_their_shapes_and_types(device: str) -> None:
    arrays = some_arrays()
    for array, tensor in zip(arrays, send(torch.device(device), *arrays), strict=True):
        assert tensor.device.type == device
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)


def test_a_cpu_shares_the_memory_of_the_arrays() -> None:
    array = np.arange(4)
    [tensor] = send(CPU, array)
    array[2] = 9
    assert tensor.tolist() == [0, 1, 9, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_sent_while_the_device_is_busy_is_not_overwritten_by_what_is_sent_next(device: str) -> None:
    busy = torch.ones(2048 if device == "cuda" else 8, 2048 if device == "cuda" else 8, device=device)
    staging, seen, sent = Staging(torch.device(device), 3), [], []
    for value in range(50):
        busy = busy @ busy / len(busy)
        staging.begin()
        array = staging.take(3)
        array[:] = value
        seen.append(staging.send(array)[0].clone())
        sent += send(torch.device(device), np.full(3, value))
    assert [tensor.tolist() for tensor in seen] == [[value] * 3 for value in range(50)]
    assert [tensor.tolist() for tensor in sent] == [[value] * 3 for value in range(50)]
    assert bool((busy == 1).all())


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_go_to_the_device_in_the_wanted_type(device: str) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    there = send_tensor(tensor, torch.device(device), torch.bfloat16)
    assert (there.device.type, there.dtype) == (device, torch.bfloat16)
    assert (there * 2).tolist() == [[0, 2, 4], [6, 8, 10]]


def test_a_tensor_that_is_where_it_should_be_is_not_copied() -> None:
    tensor = torch.arange(3.0)
    assert send_tensor(tensor, CPU, torch.float32) is tensor


@pytest.mark.parametrize("device", DEVICES)
def test_the_newest_token_of_a_slot_stands_in_for_one_that_is_not_known(device: str) -> None:
    last = LastTokens(4, torch.device(device))
    last.put([2, 0], torch.tensor([31, 17], dtype=torch.int32, device=device))
    last.put([2], torch.tensor([40], device=device))
    ids, slots = send(torch.device(device), np.array([5, -1, -1, 6]), np.array([2, 2, 0, 1]))
    assert last.fill(ids, slots).tolist() == [5, 40, 17, 6]


def caches(seed: int, num_blocks: int, device: str = "cpu", *, pin: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layers = [torch.randn(2, num_blocks, 4, 1, 2, generator=generator) for _ in range(2)]
    return [layer.pin_memory() if pin else layer.to(device) for layer in layers]


MOVES = [
    BlockMove("copy", 1, 5),  # block 5 is written, and then read
    BlockMove("copy", 5, 6),
    BlockMove("out", 1, 2),
    BlockMove("out", 2, 3),
    BlockMove("out", 7, 1),
    BlockMove("in", 2, 8),
    BlockMove("in", 3, 9),
    BlockMove("in", 1, 1),
]


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_moved_in_the_order_of_the_moves(device: str) -> None:
    on_device, on_host = caches(1, 10, device), caches(2, 4, pin=device == "cuda")
    expected = {"device": [cache.cpu().clone() for cache in on_device], "host": [cache.clone() for cache in on_host]}
    ends = {"copy": ("device", "device"), "out": ("device", "host"), "in": ("host", "device")}
    for move in MOVES:
        source, target = ends[move.kind]
        for layer in range(2):
            expected[target][layer][:, move.target] = expected[source][layer][:, move.source]
    move_blocks(MOVES, on_device, on_host.__getitem__)
    for layer in range(2):
        assert torch.equal(on_device[layer].cpu(), expected["device"][layer])
        assert torch.equal(on_host[layer], expected["host"][layer])


def test_blocks_side_by_side_at_both_ends_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    [source, _], [target, _] = caches(1, 10), caches(2, 10)
    pairs = [(1, 4), (2, 5), (3, 6), (4, 8), (6, 9), (7, 1)]
    expected = target.clone()
    for first, second in pairs:
        expected[:, second] = source[:, first]
    sizes: list[int] = []
    copy = torch.Tensor.copy_

    def counted(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        sizes.append(len(self))
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    copy_runs(source, target, [BlockMove("out", *pair) for pair in pairs])
    assert torch.equal(target, expected)
    assert sizes == [3, 3, 1, 1, 1, 1, 1, 1]  # keys and values of each run


@pytest.mark.parametrize("device", DEVICES)
def test_keys_and_values_of_tokens_are_read_from_and_written_to_any_blocks(device: str) -> None:
    source, target = caches(1, 6, device), caches(2, 9, device)
    tokens = read_tokens(source, [3, 1, 5], 2, 11).wait()
    assert tokens.shape == (9, 2, 2, 1, 2)
    assert tokens.device == source[0].device
    write_tokens(target, [7, 2, 8], 2, tokens)
    assert torch.equal(read_tokens(target, [7, 2, 8], 2, 11).wait(), tokens)
    assert torch.equal(target[0][:, 7, 2:].cpu(), source[0][:, 3, 2:].cpu())
