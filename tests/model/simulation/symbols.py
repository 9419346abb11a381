"""A model whose keys, values and tokens are symbols: it shows at once where one has been used that is not right.

The key and the value of a token are a number made of all tokens before it and of the contents of the media among them.
A step checks every key that attention would read against what it should be; the next token is made of the last one's
number. The engine around it (scheduler, intake, caches, block tables, swapping, sampling) is the real one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as ListOf
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from common.config import EngineConfig
from common.hashing import content_hash
from common.messages import InputLayout
from common.model_info import ModelInfo, load_model_info
from engine.cache.block_manager import BlockManager
from engine.cache.encoder_cache import EncoderCacheManager
from engine.core.encoder_engine import EncoderResult
from engine.device.memory import MemoryReport
from engine.processors import ProcessedInput
from engine.runner.decoder import DecoderRunner, StepOutput
from engine.state.inputs import InputBuffers, ScheduledStep
from engine.state.request import Request, Sequence
from engine.state.spec import DecoderSpec
from services.encode.preprocess_pool import MemoryGate, PreprocessPool

HIDDEN = 2
ROW_BYTES = HIDDEN * 4
MAX_MODEL_LEN = 64
TOKEN_BYTES = 8
"""Of the key and the value of one token."""
_LARGEST = 1 << 24
"""Up to here every whole number is a float32."""


@lru_cache
def model_info() -> ModelInfo:
    """That of the bundled model; only its sizes are made up."""
    return load_model_info("signpost")


def placeholder() -> int:
    found = model_info().placeholder_token_id
    assert found is not None
    return found


def symbol(*parts: object) -> int:
    """A number for what the parts are, never 0, which is what an empty cache holds."""
    return zlib.crc32(repr(parts).encode()) % (_LARGEST - 1) + 1


def symbol_of_content(content_hash: str) -> int:
    """What an encoder makes of a content: a tensor full of this number."""
    return symbol("content", content_hash)


def chain(token_ids: ListOf[int], contents: ListOf[str]) -> list[int]:
    """The symbol of each token; `contents[i]` is the media content that token i stands for, empty for text."""
    symbols, last = [], 0
    for token, content in zip(token_ids, contents, strict=True):
        last = symbol(last, token, content)
        symbols.append(last)
    return symbols


def next_token(last_symbol: int) -> int:
    """A token of the text vocabulary that ends nothing."""
    return 1 + last_symbol % 300


def expected_tokens(prompt: ListOf[int], contents: ListOf[str], max_tokens: int) -> list[int]:
    """What a request must generate, wherever it runs and whatever happens meanwhile; `prompt` is expanded."""
    tokens, known = list(prompt), list(contents)
    for _ in range(max_tokens):
        tokens.append(next_token(chain(tokens, known)[-1]))
        known.append("")
    return tokens[len(prompt) :]


class WrongSymbol(AssertionError):
    """Something has been read that is not what should be there: freed, overwritten, or somebody else's."""


class SymbolicRunner(DecoderRunner):
    """Stands in for the real runner, with real (tiny) cache tensors, so that moves and transfers of blocks are real."""

    def __init__(self, info: ModelInfo, config: EngineConfig, beside_bytes: int = 0) -> None:
        assert config.kv_cache_bytes is not None
        assert config.encoder_cache_bytes is not None
        self.info = info
        self.device, self.dtype, self.graphs = torch.device("cpu"), torch.float32, None
        self.adapters = None
        self.spec = DecoderSpec(
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            hidden_size=HIDDEN,
            vocab_size=info.vocab_size,
            max_model_len=MAX_MODEL_LEN,
        )
        self.max_model_len = MAX_MODEL_LEN
        self.block_size = config.block_size
        self.buffers = InputBuffers(config.max_num_seqs, MAX_MODEL_LEN, config.block_size)
        swap = config.swap_bytes or 0
        self.memory = MemoryReport(
            0, None, None, kv_cache=config.kv_cache_bytes, encoder_cache=config.encoder_cache_bytes, swap=swap
        )
        self.num_blocks = config.kv_cache_bytes // self.block_bytes + 1
        self.caches = [torch.zeros(2, self.num_blocks, config.block_size, 1, 1)]
        self.num_host_blocks = min(swap // self.block_bytes, self.num_blocks)
        self._host_caches = []

    def run(self, step: ScheduledStep, blocks: BlockManager, cache: EncoderCacheManager) -> StepOutput:
        finished, tokens = [], []
        for sequence, count in zip(step.sequences, step.num_tokens, strict=True):
            end = sequence.num_computed_tokens + count
            last = self._compute(sequence, end, blocks, cache)
            request = sequence.request
            if request.is_prompt_known and end == len(sequence.token_ids) and not request.prefill_only:
                finished.append(sequence)
                tokens.append(next_token(last))
        logits = torch.zeros(len(finished), self.spec.vocab_size)
        logits[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)] = 1.0
        return StepOutput(finished, logits, [])

    def _compute(self, sequence: Sequence, end: int, blocks: BlockManager, cache: EncoderCacheManager) -> int:
        """Check what attention would read, write what is new; returns the symbol of the last token."""
        contents = _contents(sequence)
        symbols = chain(sequence.token_ids[:end], contents[:end])
        table, first = blocks.tables[sequence.sequence_id], sequence.num_computed_tokens
        for position in range(end):
            block, slot = table[position // self.block_size], position % self.block_size
            places = [self.caches[0][side, block, slot] for side in (0, 1)]
            if position >= first:
                self._check_content(contents[position], cache)
                for place in places:
                    place.fill_(float(symbols[position]))
            elif any(int(place.item()) != symbols[position] for place in places):
                name = sequence.request.request_id
                raise WrongSymbol(f"token {position} of {name} is not in block {block} at {slot} any more")
        return symbols[-1]

    def _check_content(self, content: str, cache: EncoderCacheManager) -> None:
        if content and not bool((cache.get(content) == float(symbol_of_content(content))).all()):
            raise WrongSymbol(f"the encoder output in the room of {content} is another one's")


def _contents(sequence: Sequence) -> list[str]:
    contents = [""] * len(sequence.token_ids)
    for item in sequence.request.inputs:
        if item.start is not None and item.end is not None:
            contents[item.start : item.end] = [item.slot.content_hash] * (item.end - item.start)
    return contents


def contents_of(request: Request) -> list[str]:
    """Of the first sequence of a request."""
    return _contents(request.sequences[0])


def media(name: str, rows: int) -> bytes:
    """A picture: its name, and how many rows an encoder makes of it."""
    return f"{name}:{rows}".encode()


def rows_of(data: bytes) -> int:
    return int(data.decode().partition(":")[2])


class SymbolicPool(PreprocessPool):
    """The real admission to memory, without processes."""

    def __init__(self, model: str, dtype: str, num_workers: int, timeout_s: float, staging_bytes: int) -> None:
        self.gate = MemoryGate(staging_bytes, num_workers)
        self.num_waiting = self.num_crashes = 0

    async def warm_up(self, timeout_s: float) -> None: ...

    async def run(self, item: str, function: object, kind: str, data: bytes) -> ProcessedInput:  # type: ignore[override]
        rows = rows_of(data)
        layout = InputLayout(rows, [(placeholder(), rows)])
        arrays = {"media": np.frombuffer(data, np.uint8)}
        return ProcessedInput(arrays, layout, (rows, HIDDEN), "float32", rows * ROW_BYTES)

    def close(self) -> None: ...


class SymbolicEncoder:
    """Stands in for engine.core.encoder_engine.EncoderEngine: one item per step, so that the next may wait."""

    taken_bytes = 0

    def __init__(self, info: ModelInfo, config: EngineConfig, instance: str = "", *memory: float) -> None:
        self._items: dict[Any, ProcessedInput] = {}

    def submit(self, key: Any, item: ProcessedInput) -> None:
        self._items[key] = item

    def cancel(self, key: Any) -> None:
        self._items.pop(key, None)

    def has_work(self) -> bool:
        return bool(self._items)

    def step(self) -> list[EncoderResult]:
        if not self._items:
            return []
        key = next(iter(self._items))
        item = self._items.pop(key)
        content = content_hash("image", item.arrays["media"].tobytes())
        tensor = torch.full(item.shape, float(symbol_of_content(content)))
        return [EncoderResult(key, tensor, None, 0.0, 0.0)]

    def stats(self) -> dict[str, float]:
        return {}


def tiny_config(block_size: int, num_blocks: int, cache_rows: int, **rest: Any) -> EngineConfig:
    """An engine with so many blocks of keys and values, and room for so many rows of encoder output."""
    return EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=block_size,
        kv_cache_bytes=num_blocks * block_size * TOKEN_BYTES,
        encoder_cache_bytes=cache_rows * ROW_BYTES,
        swap_bytes=rest.pop("host_blocks", 0) * block_size * TOKEN_BYTES,
        max_num_seqs=rest.pop("max_num_seqs", 4),
        max_num_batched_tokens=rest.pop("max_num_batched_tokens", 8),
        **rest,
    )
