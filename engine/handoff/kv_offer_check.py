"""Checks of offered KV, and the names of sizes that both sides share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.device.choice import DTYPES
from engine.handoff.offer_check import OfferCheck
from engine.state.events import InputMetadata, KvMetadata
from engine.state.request import Request, RequestInput
from engine.state.spec import DecoderSpec, Table


@dataclass(frozen=True)
class KvPart:
    """KV of some tokens as received: of `table`, from token `first` on. `number` counts the parts.

    `tokens` is [num_tokens, layers, 2, num_kv_heads, head_dim] if it is what it should be, on the engine's device, and
    is only read.
    """

    number: int
    table: Table
    first: int
    tokens: torch.Tensor

    @property
    def last(self) -> int:
        """The first token behind the part."""
        return self.first + len(self.tokens)


@dataclass(frozen=True)
class KvOfferCheck:
    """The sizes of the model: shapes are [layers, 2, num_kv_heads, head_dim], empty without cross-attention.

    Both sides have one of the same model: the sender describes by it what it has, the receiver checks by it.
    """

    inputs: OfferCheck
    token_shape: tuple[int, ...]
    cross_shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, info: ModelInfo, spec: DecoderSpec, max_model_len: int, dtype: torch.dtype) -> KvOfferCheck:
        """Of a loaded model, served in `dtype` with a context of `max_model_len` tokens."""
        shape = 2, spec.num_kv_heads, spec.head_dim
        cross_shape = (spec.num_cross_layers, *shape) if spec.has_cross_attention else ()
        inputs = OfferCheck.of(info, spec, max_model_len)
        return cls(inputs, (spec.num_layers, *shape), cross_shape, str(dtype).removeprefix("torch."))

    def describe(self, request: Request) -> KvMetadata:
        """Return the offer of a prefill whose inputs are all known."""
        return KvMetadata(
            num_tokens=request.num_handoff_tokens,
            num_encoder_tokens=request.num_encoder_tokens,
            token_shape=self.token_shape,
            cross_shape=self.cross_shape,
            dtype=self.dtype,
            layouts=[item.metadata.layout for item in request.inputs if item.metadata is not None],
            seed=request.seed,
            num_cached_tokens=request.num_cached_tokens,
        )

    def fault(self, metadata: KvMetadata, request: Request) -> str | None:
        """Return the fault of an offer for this request, with the value; None without a fault."""
        sizes = metadata.token_shape, metadata.cross_shape, metadata.dtype
        expected = self.token_shape, self.cross_shape, self.dtype
        if sizes != expected:
            return f"shapes and dtype {_list(sizes)}, expected {_list(expected)}: do both serve the same model?"
        if len(metadata.layouts) != len(request.inputs):
            return f"{len(metadata.layouts)} input layouts, the request has {len(request.inputs)} inputs"
        for item, layout in zip(request.inputs, metadata.layouts, strict=True):
            fault = self._input_fault(item, layout)
            if fault is not None:
                return f"input {item.slot.input_id}: {fault}"
        rows = sum(layout.num_encoder_tokens for layout in metadata.layouts) if request.cross_attention else 0
        if metadata.num_encoder_tokens != rows:
            return f"{metadata.num_encoder_tokens} encoder tokens, the layouts have {rows}"
        num_tokens = _num_handoff_tokens(request, metadata.layouts)
        if metadata.num_tokens != num_tokens:
            return f"keys and values of {metadata.num_tokens} tokens, the request needs those of {num_tokens}"
        return None

    def _input_fault(self, item: RequestInput, layout: InputLayout) -> str | None:
        if item.metadata is not None and item.metadata.layout != layout:
            return "it has been offered with another layout"
        return self.inputs.fault(self.input_metadata(item, layout))

    def input_metadata(self, item: RequestInput, layout: InputLayout) -> InputMetadata:
        """Return the metadata of an input that was prefilled elsewhere."""
        shape = layout.num_encoder_tokens, self.inputs.hidden_size
        size_bytes = math.prod(shape) * DTYPES[self.dtype].itemsize
        return InputMetadata(shape, self.dtype, size_bytes, layout, item.slot.content_hash)

    def part_fault(self, part: KvPart) -> str | None:
        """Return the fault of a part's tensor; None without a fault."""
        expected = self.token_shape if part.table == "self" else self.cross_shape
        dtype, shape = str(part.tokens.dtype).removeprefix("torch."), tuple(part.tokens.shape)
        if dtype != self.dtype or len(shape) < 1 or shape[1:] != expected:
            return f"{dtype} {list(shape)}, expected {self.dtype} {['tokens', *expected]}"
        return None


def _num_handoff_tokens(request: Request, layouts: list[InputLayout]) -> int:
    """`request.num_handoff_tokens` with these layouts, for a prompt not expanded yet."""
    grown = 0
    if not request.is_encoder_decoder:
        grown = sum(sum(count for _, count in layout.expansion) - 1 for layout in layouts)
    resumed = len(request.resumed[0].token_ids) if len(request.resumed) == 1 else 0
    return len(request.prompt_token_ids) + grown + resumed - 1


def _list(sizes: tuple[tuple[int, ...], tuple[int, ...], str]) -> list[object]:
    return [list(sizes[0]), list(sizes[1]), sizes[2]]
