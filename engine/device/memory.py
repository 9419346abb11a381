"""Divide a worker's memory: weights, the peak of a step, and pools from the rest.

    CPU    what is available once the weights are loaded x memory_fraction      ┐
    CUDA   the device x memory_fraction - what this process has taken by then   ├─ budget = step + pools
    or     memory_bytes, as given                                               ┘

A pool whose size is given has that size. The others share what is left of the budget after the step that was measured
at start (as vLLM and others do), and none is larger than what could ever be used.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from common.config import EngineConfig
from common.errors import TriptychError
from common.process.gpu_memory import GPU_FRACTION
from common.process.host_memory import available_memory
from engine.device.gpu_memory import cuda_budget, in_words, measure_gpu

DEFAULT_FRACTION: Final = {"cpu": 0.5, "cuda": GPU_FRACTION}
"""A CPU's memory is everybody's: half of what nobody uses leaves a laptop usable. A GPU is there for this alone."""
ASSUMED_ACTIVATION_BYTES: Final = 256 * 2**20
"""Where it cannot be measured."""
SWAP_BYTES: Final = {"cpu": 128 * 2**20, "cuda": 4 * 2**30}
"""At most, and a sixteenth of what there is. On a CPU the swap space is no other memory than the pool's own."""
ENCODER_CACHE_SHARE: Final = 1 / 8
"""Of what the pools share. Inputs pass through this cache, while keys and values stay as long as their request."""
ENCODER_SHARE: Final = 1 / 4
"""Of what a process with both engines may take, for the encoder's batches at most; its weights do not count."""
MAX_STAGING_BYTES: Final = 64 * 2**20
"""Of preprocessed media that wait for a grant or for the encoder: those of an image of a megapixel have 24 MB."""
OUTPUT_CACHE_BYTES: Final = 256 * 2**20
"""Of outputs that an encoder worker keeps on its device; on a CPU no more than a sixteenth of what it may take."""
HUGE_PAGES_FROM_BYTES: Final = 32 * 2**20


def memory_budget(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes available to a worker beside its loaded weights.

    Raises TriptychError("invalid_request") where other processes have left it less of a GPU than its share.
    """
    if config.memory_bytes is not None:
        return config.memory_bytes
    if device.type == "cuda":
        return cuda_budget(config, measure_gpu(device))
    return int((config.memory_fraction or DEFAULT_FRACTION["cpu"]) * available_memory())


@dataclass(frozen=True)
class DecoderNeeds:
    """Byte sizes that determine a decoder's pools.

    block               one block of the KV cache over all layers
    request             the KV cache of the shortest request that makes sense
    all_requests        the KV cache of as many sequences as may run, all at full length
    input               the largest encoder output that a request can have; 0 for a text-only model
    all_inputs          one such output for each sequence that may run
    decode_share        what a decode step takes for itself, as a fraction of the KV cache that it reads
    """

    block: int
    request: int
    all_requests: int
    input: int
    all_inputs: int
    decode_share: float = 0.0


@dataclass(frozen=True)
class MemoryReport:
    """Use of a worker's memory, in bytes, with marks for sizes given by the user.

    `budget` is for all but the weights; None where every size was given. `activation` is what a step takes at most;
    None where nothing had to be sized by it.
    """

    weights: int
    activation: int | None
    budget: int | None
    activation_measured: bool = False
    kv_cache: int = 0
    encoder_cache: int = 0
    swap: int = 0
    given: frozenset[str] = frozenset()
    output_cache: int = 0

    @classmethod
    def of_encoder(
        cls, config: EngineConfig, weights: int, activation: int | None, budget: int, output_cache: int
    ) -> MemoryReport:
        """Report of an encoder. Its only pool keeps outputs, outside `budget`; `activation` belongs to the largest
        batch."""
        known = ASSUMED_ACTIVATION_BYTES if activation is None else activation
        given = _given(config) & {"memory_budget", "encoder_output_cache"}
        return cls(weights, known, budget, activation is not None, output_cache=output_cache, given=given)

    def stats(self) -> dict[str, float]:
        """Return gauges. `..._given` is 1 for a size given by the user, 0 for a size worked out at start."""
        sizes = {
            "memory_weights_bytes": self.weights,
            "memory_activation_bytes": self.activation or 0,
            "memory_activation_measured": self.activation_measured,
            "memory_budget_bytes": self.budget or 0,
        }
        pools = {f"{name}_bytes": size for name, size in self._pools().items()}
        origins = {f"{name}_given": name in self.given for name in (*self._pools(), "memory_budget")}
        return {name: float(value) for name, value in (sizes | pools | origins).items()}

    def describe(self) -> dict[str, str]:
        """The same for a log line: `kv_cache="3.2 GiB measured"`."""
        said = {"weights": in_words(self.weights)}
        if self.activation is not None:
            said["step"] = f"{in_words(self.activation)} {'measured' if self.activation_measured else 'assumed'}"
        if self.budget is not None:
            said["budget"] = f"{in_words(self.budget)} {self._origin('memory_budget')}"
        return said | {name: f"{in_words(size)} {self._origin(name)}" for name, size in self._pools().items()}

    def _origin(self, name: str) -> str:
        return "given" if name in self.given else "measured"

    def _pools(self) -> dict[str, int]:
        if self.kv_cache == 0:
            return {"encoder_output_cache": self.output_cache} if self.output_cache else {}
        return {"kv_cache": self.kv_cache, "encoder_cache": self.encoder_cache, "swap": self.swap}


def all_pools_given(config: EngineConfig) -> bool:
    """Return whether no size is left to measure."""
    return None not in (config.kv_cache_bytes, config.encoder_cache_bytes, config.swap_bytes)


def size_decoder(
    config: EngineConfig,
    needs: DecoderNeeds,
    device: torch.device,
    weights: int,
    activation: int | None,
    beside: int = 0,
) -> MemoryReport:
    """Size a decoder's pools. `activation` is the peak of the largest step; None if unknown.

    `beside` is what an encoder in the same process takes while it runs, its weights apart: both may run at once.

    Raises TriptychError("invalid_request") with all the numbers where not even one request would fit.
    """
    given = _given(config)
    kv_cache: int | None = config.kv_cache_bytes
    encoder_cache: int | None = config.encoder_cache_bytes
    swap: int | None = config.swap_bytes
    if kv_cache is not None and kv_cache < needs.block:
        message = f"kv_cache_bytes={kv_cache} is less than one block of {needs.block}"
        raise TriptychError("invalid_request", message, "kv_cache_bytes")
    if kv_cache is not None and encoder_cache is not None and swap is not None:
        return MemoryReport(weights, None, None, False, kv_cache, encoder_cache, swap, given)
    budget = memory_budget(config, device) - beside
    step = ASSUMED_ACTIVATION_BYTES if activation is None else activation
    left = budget - step
    if swap is None:
        there = left if device.type == "cpu" else available_memory()
        swap = max(0, min(SWAP_BYTES[device.type], there // 16))
    left -= swap if device.type == "cpu" else 0
    left -= kv_cache or 0
    if encoder_cache is None:  # a share of the rest, or enough for the largest input if at most half of the rest
        at_least = min(needs.input, max(0, left) // 2)
        encoder_cache = min(needs.all_inputs, max(int(left * ENCODER_CACHE_SHARE), at_least))
    left -= encoder_cache
    if kv_cache is None:
        kv_cache = min(int(left / (1 + needs.decode_share)), needs.all_requests)
        if kv_cache < needs.request:
            taken = {
                f"a step of {config.max_num_batched_tokens} tokens": step,
                "the encoder and adapters beside it": beside,
                "encoder outputs": encoder_cache,
                "swapping": swap if device.type == "cpu" else 0,
            }
            raise _too_little(config, device, weights, budget + beside, taken, needs)
    return MemoryReport(weights, step, budget, activation is not None, kv_cache, encoder_cache, swap, given)


def _given(config: EngineConfig) -> frozenset[str]:
    sizes = {
        "kv_cache": config.kv_cache_bytes,
        "encoder_cache": config.encoder_cache_bytes,
        "swap": config.swap_bytes,
        "encoder_output_cache": config.encoder_output_cache_bytes,
        "memory_budget": config.memory_bytes,
    }
    return frozenset(name for name, size in sizes.items() if size is not None)


def check_encoder_budget(config: EngineConfig, device: torch.device, weights: int, budget: int, smallest: int) -> None:
    """Raise TriptychError("invalid_request") if an encoder lacks memory for its smallest item."""
    if smallest > budget:
        message = (
            f"too little memory: this encoder may take {in_words(budget)} beside its weights ({in_words(weights)}); "
            f"its smallest item needs {in_words(smallest)}. {_remedy(config, device)}"
        )
        raise TriptychError("invalid_request", message, "memory_fraction")


def staging_budget(config: EngineConfig) -> int:
    """Return the limit of an encoder's preprocessed media on the host, in bytes: a quarter of its budget."""
    return min(MAX_STAGING_BYTES, memory_budget(config, torch.device("cpu")) // 4)


def output_cache_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the limit of outputs kept by an encoder worker on `device`, in bytes."""
    if config.encoder_output_cache_bytes is not None:
        return config.encoder_output_cache_bytes
    if device.type == "cuda":  # its budget is known once the weights are there, and this is a small part of any
        return OUTPUT_CACHE_BYTES
    return min(OUTPUT_CACHE_BYTES, memory_budget(config, device) // 16)


def _too_little(
    config: EngineConfig, device: torch.device, weights: int, budget: int, taken: dict[str, int], needs: DecoderNeeds
) -> TriptychError:
    uses = " and ".join(f"{in_words(size)} for {use}" for use, size in taken.items() if size)
    message = (
        f"too little memory: this worker may take {in_words(budget)} beside its weights "
        f"({in_words(weights)}); of that {uses} are taken, and the shortest request needs "
        f"{in_words(needs.request)} of KV cache. {_remedy(config, device)}, give "
        f"--kv-cache-bytes, or lower --max-num-batched-tokens ({config.max_num_batched_tokens} now), --max-num-seqs "
        f"({config.max_num_seqs} now) or --max-model-len"
    )
    return TriptychError("invalid_request", message, "memory_fraction")


def _remedy(config: EngineConfig, device: torch.device) -> str:
    share = config.memory_fraction or DEFAULT_FRACTION[device.type]
    whole = "GPU's memory" if device.type == "cuda" else "machine's free memory"
    return f"Raise --memory-bytes or --memory-fraction ({share} of this {whole} now)"


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros lazily: the kernel fills pages at the first write. `torch.zeros` touches all pages, a second per
    few gigabytes at start."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size_bytes == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    pages: Any = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= HUGE_PAGES_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # blocks are handed out in order: few pages are touched in vain
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
