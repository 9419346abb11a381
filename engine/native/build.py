"""Compile the kernels with this machine's C++ compiler and load the library; four seconds, once per machine.

The kernels of a decode step use AVX-512 with bfloat16 products (x86 servers from Cooper Lake, Zen 4 on), else AVX2, as
those of quantised weights. Whoever lacks AVX2 (x86 before Haswell, Zen), or a compiler, computes with PyTorch alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final, NamedTuple


class KernelSource(NamedTuple):
    """A C++ file, how it is compiled, and what the processor must have (by the names of /proc/cpuinfo)."""

    path: Path
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]


_FLAGS: Final = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
_WIDE: Final = ("-march=x86-64-v4", "-mavx512bf16", *_FLAGS)
_HAS_WIDE: Final = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
_NARROW: Final = ("-march=x86-64-v3", *_FLAGS)
_HAS_NARROW: Final = frozenset({"avx2", "fma", "f16c"})
_FOLDER: Final = Path(__file__).parent
STEPS: Final = (
    KernelSource(_FOLDER / "kernels.cpp", _WIDE, _HAS_WIDE),
    KernelSource(_FOLDER / "kernels.cpp", _NARROW, _HAS_NARROW),
)
"""The kernels of a decode step: a processor has the first that it can run."""
QUANTISED: Final = KernelSource(_FOLDER / "quantised.cpp", _NARROW, _HAS_NARROW)
_HEADERS: Final = ("calls.h", "vectors.h")
_COMPILERS: Final = ("c++", "g++", "clang++")
_TIMEOUT_S: Final = 120.0
_SHOWN_CHARACTERS: Final = 300


class KernelsUnavailableError(Exception):
    """The kernels cannot run here; the message says why."""


def in_one_line(error: BaseException) -> str:
    """Return an error's type and the end of its message, the place of a compiler's reason."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[-_SHOWN_CHARACTERS:]}" if words else type(error).__name__


loaded: Final[dict[KernelSource, ctypes.CDLL]] = {}
"""Every library that this process has loaded."""


def step_kernels() -> KernelSource:
    """Return the kernels of a decode step for this processor."""
    return next((source for source in STEPS if source.cpu_flags <= cpu_flags()), STEPS[-1])


@functools.cache
def load_kernels(source: KernelSource | None = None) -> ctypes.CDLL:
    """The compiled kernels, those of a decode step unless told otherwise.

    Raises KernelsUnavailableError without the processor, a compiler or a place to write.
    """
    source = source or step_kernels()
    missing = source.cpu_flags - cpu_flags()
    if missing:
        raise KernelsUnavailableError(f"this processor lacks {', '.join(sorted(missing))}")
    # OpenMP is that of PyTorch, which has to be loaded first: two of them would compete for the cores.
    import torch  # noqa: F401

    with contextlib.ExitStack() as once_loaded:
        try:
            return loaded.setdefault(source, ctypes.CDLL(str(compiled_kernels(source, once_loaded))))
        except OSError as error:
            raise KernelsUnavailableError(f"the compiled kernels do not load: {error}") from error


def cpu_flags() -> frozenset[str]:
    """Return what the processor can do, by the names of /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def compiled_kernels(source: KernelSource, end: contextlib.ExitStack | None = None) -> Path:
    """Return the path of the library, compiled if missing. The name contains source and flags, and fits any equal
    processor.

    An image whose workers have no compiler can call this while it is built. Where the user's cache cannot be written,
    the library lies in a folder of this call, removed at `end`: once loaded, it needs no file.
    """
    texts = [path.read_text() for path in (source.path, *map(_FOLDER.joinpath, _HEADERS))]
    digest = hashlib.sha256(" ".join((*texts, *source.flags)).encode()).hexdigest()[:16]
    name = f"{source.path.stem}-{digest}.so"
    path = _cache_folder() / name
    if os.path.exists(path):  # not where the cache cannot be searched: `Path.exists` raises there
        return path
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise KernelsUnavailableError(
            f"no C++ compiler: none of {', '.join(_COMPILERS)} is on PATH, and CXX is not set"
        )
    with contextlib.suppress(OSError):  # a read-only home, say
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _compile(compiler, source, path)
    own = Path(tempfile.mkdtemp(prefix="triptych-"))
    if end is not None:
        end.callback(shutil.rmtree, own, ignore_errors=True)
    return _compile(compiler, source, own / name)


def _cache_folder() -> Path:
    """Return the user's cache folder; without a home, one that can be neither read nor written."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"
    except RuntimeError:
        return Path(os.devnull)


def _compile(compiler: str, source: KernelSource, path: Path) -> Path:
    """Compile into a temporary file, rename it to `path` and return that: several workers may compile at once, and the
    last rename wins.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as file:
        temporary = Path(file.name)
    try:
        command = [compiler, *source.flags, str(source.path), "-o", str(temporary)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise KernelsUnavailableError(f"{compiler} cannot compile the kernels: {first}")
        return temporary.rename(path)
    except subprocess.SubprocessError as error:
        raise KernelsUnavailableError(f"{compiler} does not run: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
