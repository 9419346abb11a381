"""CUDA's own library: its functions without a GPU, and with one what the fake promises of it."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.transports.cuda import runtime as cuda_runtime
from broker.transports.cuda.runtime import HANDLE_BYTES, CudaError, CudaRuntime
from tests.broker.transports.cuda import cuda_ipc
from tests.broker.transports.fake_cuda import FakeCuda


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    try:
        yield cuda_runtime._load()
    except CudaError as error:
        pytest.skip(str(error))


@pytest.fixture
def cuda(library: ctypes.CDLL) -> CudaRuntime:
    """The library with a device, where there is one."""
    try:
        return CudaRuntime()
    except CudaError as error:
        pytest.skip(str(error))


def test_every_function_is_in_cudas_library(library: ctypes.CDLL) -> None:
    """As far as it goes without a GPU: the names are right. The list is that of the calls in the module's source."""
    source = Path(cuda_runtime.__file__).read_text()
    names = {word.strip('"') for word in source.replace("(", " ").replace(",", " ").split() if word.startswith('"cuda')}
    names |= {"cudaGetErrorString", "cudaGetLastError"}
    assert len(names) == 15
    for name in names:
        assert hasattr(library, name), name


def test_without_a_gpu_the_error_has_cudas_own_words(library: ctypes.CDLL) -> None:
    count = ctypes.c_int()
    if library.cudaGetDeviceCount(ctypes.byref(count)) == 0 and count.value:
        pytest.skip("there is a GPU")
    with pytest.raises(CudaError, match=r"cudaSetDevice: .+ \(error \d+\)"):
        CudaRuntime()


def test_memory_that_another_process_cannot_open_is_a_fault_of_the_machine() -> None:
    """With a GPU, it refuses a handle that is none of its own; without one, CUDA refuses everything."""
    fake = FakeCuda()
    assert re.match("CUDA IPC does not work on this machine: .*(cuda|CUDA)", cuda_ipc.fault_of(fake) or "")
    assert fake.num_held == 0


@pytest.mark.gpu
def test_a_device_copies_as_the_fake_does(cuda: CudaRuntime) -> None:
    """Memory there and back on a stream of its own."""
    data = os.urandom(1000)
    source, back = ctypes.create_string_buffer(data, 1000), ctypes.create_string_buffer(1000)
    pointer, stream = cuda.allocate(1000), cuda.make_stream()
    cuda.copy(pointer, ctypes.addressof(source), 1000, stream)
    cuda.synchronize(stream)
    cuda.copy(ctypes.addressof(back), pointer, 1000, stream)
    cuda.synchronize(stream)
    assert back.raw == data
    cuda.destroy_stream(stream)
    cuda.free(pointer)


@pytest.mark.gpu
def test_a_device_exports_memory_and_refuses_a_handle_of_nothing(cuda: CudaRuntime) -> None:
    fault = cuda_ipc.fault()
    if fault is not None:
        pytest.skip(fault)
    pointer = cuda.allocate(1000)
    assert len(cuda.export(pointer)) == HANDLE_BYTES
    assert cuda.can_read(cuda.device_id)
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle"):
        cuda.open(bytes(HANDLE_BYTES))
    cuda.free(pointer)
