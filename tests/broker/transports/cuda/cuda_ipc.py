"""Whether memory of the GPU can go from process to process on this machine: found by doing it.

python -m tests.broker.transports.cuda.cuda_ipc HANDLE    opens memory of another process by its handle, in hexadecimal
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from broker.transports.cuda.runtime import CudaError, CudaRuntime
from tests.broker.transports.transport_kit import ROOT

_REFUSED = 3
_LIMIT_S = 60.0
_BYTES = 2**21


@cache
def fault() -> str | None:
    """Why it cannot, for a test that is skipped then; None where it can. Containers and sandboxes may forbid it.

    Raises CudaError without a GPU, and RuntimeError where the other process fails by itself.
    """
    return fault_of(CudaRuntime())


def fault_of(cuda: CudaRuntime) -> str | None:
    """The same, with memory of this runtime."""
    pointer = cuda.allocate(_BYTES)
    try:
        words = _opened_elsewhere(cuda.export(pointer))
    except CudaError as error:
        words = str(error)
    finally:
        cuda.free(pointer)
    return None if words is None else f"CUDA IPC does not work on this machine: {words}"


def _opened_elsewhere(handle: bytes) -> str | None:
    """What CUDA says against it in another process; None where that has opened the memory."""
    command = [sys.executable, "-m", "tests.broker.transports.cuda.cuda_ipc", handle.hex()]
    other = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if other.returncode not in (0, _REFUSED):
        raise RuntimeError(f"the other process ended with {other.returncode}: {other.stderr}")
    return other.stdout.strip() if other.returncode == _REFUSED else None


def main(digits: str) -> int:
    """The exit status: 0 once the memory is open, otherwise _REFUSED, with CUDA's words on stdout."""
    try:
        cuda = CudaRuntime()
        cuda.close(cuda.open(bytes.fromhex(digits)))
    except CudaError as error:
        print(error)
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
