"""FlashInfer's kernels, built ahead of their use: those that given models need, the GPU check, or all.

    python -m tools.gpu_check.kernels --check           all that `make gpu-check` needs,
                                                   into FLASHINFER_WORKSPACE_BASE (the home folder, if not set)
    python -m tools.gpu_check.kernels --served          every size of heads that is served, in every dtype
    python -m tools.gpu_check.kernels MODEL…            what these models need
    python -m tools.gpu_check.kernels --list …          what that would be
    python -m tools.gpu_check.kernels --install …       into FlashInfer's own folder, too: found without a compiler

A kernel is compiled when it is first used, which takes minutes; this does it without a GPU, too. It takes nvcc and
ninja, FLASHINFER_CUDA_ARCH_LIST (9.0a for H100 and H200) where there is no GPU to ask, and a libcuda to link against:
without a driver, a stub on LIBRARY_PATH. What is built is found again by the same version of FlashInfer alone.
"""

from __future__ import annotations

import argparse
import itertools
import pkgutil
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from common.model_info import ModelInfo, load_model_info
from engine.attention.flashinfer import served
from engine.attention.flashinfer.served import is_appended, needs_tensor_cores, unserved
from engine.device.choice import DTYPES
from engine.encoders.attention import flash_part, head_sizes
from engine.models.registry import make_decoder, make_encoder
from engine.state.spec import HeadSpec
from tools.gpu_check.cases import CASES, AttentionCase

_ORDER: Final = "page", "sampling", "quantization", "decode", "prefill"
_NO_POSITIONS: Final = 0
"""FlashInfer's number for "positions are not rotated by attention"."""


@dataclass(frozen=True, order=True)
class Kernel:
    """One library that FlashInfer compiles. `page` writes keys and values, `sampling` finds top-p, `quantization` packs
    the bits of masks; `decode` runs on the vector units and `prefill` on tensor cores: prefills, encoders, and decodes
    of large groups of heads."""

    kind: Literal["page", "sampling", "quantization", "decode", "prefill"]
    dtype: str = ""
    head_dim: int = 0
    window: bool = False

    def __str__(self) -> str:
        sizes = f" {self.dtype} heads of {self.head_dim}" if self.head_dim else ""
        return f"{self.kind}{sizes}{' in a window' if self.window else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the kernels and print what each took; returns the exit status, 1 if one could not be built."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", help="model folders; configurations suffice")
    parser.add_argument("--check", action="store_true", help="those that the GPU check needs")
    parser.add_argument("--served", action="store_true", help="every size of heads that is served, in every dtype")
    parser.add_argument("--install", action="store_true", help="put them into FlashInfer's package, and load each")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--list", action="store_true", help="print them and build nothing")
    options = parser.parse_args(arguments)
    if not options.models and not options.check and not options.served:
        parser.error("which kernels? Name models, --check or --served")
    kernels = needed_kernels((load_model_info(model) for model in options.models), options.dtype)
    more = [*(check_kernels() if options.check else ()), *(served_kernels() if options.served else ())]
    kernels = _in_order({*kernels, *more})
    if options.list:
        print("\n".join(map(str, kernels)))
        return 0
    failures = 0
    for number, kernel in enumerate(kernels, 1):
        print(f"[{number}/{len(kernels)}] {kernel}: ", end="", flush=True)
        began = time.monotonic()
        try:
            library = install(kernel) if options.install else build(kernel)
        except (RuntimeError, OSError) as error:
            failures += 1
            print(f"FAILED\n{error}")
        else:
            print(f"{time.monotonic() - began:.0f} s, {library.stat().st_size / 2**10:.0f} KiB")
    return int(failures > 0)


def needed_kernels(models: Iterable[ModelInfo], dtype: str) -> list[Kernel]:
    """Without duplicates, those that are quickly built first. Heads that FlashInfer does not serve need none."""
    return _in_order({kernel for info in models for kernel in (*_of_decoder(info, dtype), *_of_encoder(info, dtype))})


def check_kernels() -> list[Kernel]:
    """Those that the GPU check asks for: of its cases of attention, and so of all its models."""
    return _in_order({Kernel("quantization"), *(kernel for case in CASES for kernel in _of_case(case))})


def served_kernels() -> list[Kernel]:
    """Those of all heads that a model may have: an image is built before anybody names a model."""
    dtypes = [name for name, dtype in DTYPES.items() if dtype in served.DTYPES]
    kinds: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")
    sizes = itertools.product(kinds, dtypes, served.HEAD_DIMS, (False, True))
    return _in_order({Kernel("page"), Kernel("sampling"), Kernel("quantization"), *itertools.starmap(Kernel, sizes)})


def build(kernel: Kernel) -> Path:
    """Compile a kernel, unless it is there already; returns the library. Raises RuntimeError as the compiler says."""
    spec = _specification(kernel)
    spec.build(verbose=False)
    library: Path = spec.jit_library_path
    return library


def install(kernel: Kernel) -> Path:
    """Build a kernel and copy the library to where FlashInfer looks before it compiles; returns the copy.

    Raises RuntimeError as the compiler says, or if FlashInfer would not take the copy, OSError as the loader says.
    """
    library, spec = build(kernel), _specification(kernel)
    place: Path = spec.aot_path
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(library, place)
    if spec.get_library_path() != place:
        raise RuntimeError(f"FlashInfer looks for {spec.name} at {spec.get_library_path()}, not at {place}")
    spec.load(place)
    return place


def _in_order(kernels: Collection[Kernel]) -> list[Kernel]:
    return sorted(kernels, key=lambda kernel: (_ORDER.index(kernel.kind), kernel))


def _of_decoder(info: ModelInfo, dtype: str) -> Iterator[Kernel]:
    model = make_decoder(info)
    windows = {getattr(module, "window", None) is not None for module in model.modules() if hasattr(module, "window")}
    yield Kernel("sampling")
    if model.spec.whole_input_tokens or model.spec.biased:
        yield Kernel("quantization")
    for window in windows or {False}:
        yield from _of_heads(HeadSpec.of(model.spec), dtype, window=window)


def _of_case(case: AttentionCase) -> Iterator[Kernel]:
    heads = HeadSpec(case.num_heads, case.num_kv_heads, case.head_dim)
    yield Kernel("sampling")
    yield from _of_heads(heads, case.dtype, window=case.window is not None)


def _of_heads(heads: HeadSpec, dtype: str, *, window: bool) -> Iterator[Kernel]:
    """Of a decoder's attention, and of writing its keys and values."""
    if is_appended(heads.num_kv_heads, heads.head_dim):
        yield Kernel("page")
    if unserved(heads, DTYPES[dtype]) is not None:
        return
    yield Kernel("prefill", dtype, heads.head_dim, window)
    if not needs_tensor_cores(heads.num_heads, heads.num_kv_heads):
        yield Kernel("decode", dtype, heads.head_dim, window)


def _of_encoder(info: ModelInfo, dtype: str) -> Iterator[Kernel]:
    if info.media_kind is not None and (part := flash_part(make_encoder(info))) is not None:
        for num_heads, head_dim in head_sizes(part):
            if unserved(HeadSpec(num_heads, num_heads, head_dim), DTYPES[dtype]) is None:
                yield Kernel("prefill", dtype, head_dim)


def _specification(kernel: Kernel) -> Any:
    """FlashInfer's description of the library, by the same words with which its wrappers ask for it: for prefills that
    of keys and values that lie alike, as ours do."""
    from flashinfer.jit.attention import modules

    if not kernel.dtype:
        return pkgutil.resolve_name(f"flashinfer.jit.{kernel.kind}:gen_{kernel.kind}_module")()
    dtype = DTYPES[kernel.dtype]
    types = (dtype, dtype, dtype, torch.int32)
    sizes = (kernel.head_dim, kernel.head_dim, _NO_POSITIONS, kernel.window, False)
    if kernel.kind == "decode":
        return modules.gen_batch_decode_module(*types, *sizes)
    return modules._gen_batch_prefill_primary_module("fa2", *types, *sizes, False)


if __name__ == "__main__":
    sys.exit(main())
