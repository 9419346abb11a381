"""Checks of offers, complete before an offer is accepted: encoder outputs, and the KV of prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from common.messages import InputLayout, KvOffer, Offer
from common.model_info import ModelInfo
from engine.device.choice import DTYPES
from engine.state.request import Request, RequestInput
from engine.state.spec import DecoderSpec, Table

_LAST_TIME: Final = 2**24


@dataclass(frozen=True)
class OfferCheck:
    """Sizes of the model for offers. `placeholder` is None for inputs outside the prompt; videos have their own.

    With `cross_attention` a placeholder stays one token, however many rows the encoder has for it.
    """

    hidden_size: int
    vocab_size: int
    max_rows: int
    placeholder: int | None
    cross_attention: bool = False
    video_placeholder: int | None = None

    def fault(self, offer: Offer) -> str | None:
        """Return the fault of an offer, with the value; None without a fault."""
        layout = offer.layout
        rows, expansion = layout.num_encoder_tokens, layout.expansion
        if not 1 <= rows <= self.max_rows:
            return f"{rows} encoder tokens, expected 1 to {self.max_rows}"
        if list(offer.shape) != [rows, self.hidden_size]:
            return f"shape {list(offer.shape)}, expected [{rows}, {self.hidden_size}]: do both serve the same model?"
        visible = layout.num_visible_tokens
        if visible is not None and not (self.cross_attention and 1 <= visible <= rows):
            return f"{visible} visible encoder tokens of {rows}"
        if self.placeholder is None:
            return f"an expansion of {len(expansion)} runs, expected none" if expansion or layout.grid else None
        placeholder = self.video_placeholder if offer.kind == "video" else self.placeholder
        if placeholder is None:
            return f"a {offer.kind}, which the model does not take"
        if any(n < 1 or not (0 <= token < self.vocab_size or token == placeholder) for token, n in expansion):
            return f"an expansion with a count below 1 or a token id outside the vocabulary of {self.vocab_size}"
        if self.cross_attention:
            good = list(expansion) == [(placeholder, 1)] and layout.grid is None
            return None if good else f"an expansion of {len(expansion)} runs, expected the placeholder itself"
        placeholders = sum(count for token, count in expansion if token == placeholder)
        if placeholders != rows or sum(count for _, count in expansion) > self.max_rows:
            return f"{placeholders} placeholders in the expansion for {rows} encoder tokens"
        return _grid_fault(layout, placeholder)


def _grid_fault(layout: InputLayout, placeholder: int) -> str | None:
    """Return the fault of a layout's positions; None without a fault."""
    grid, times, expansion = layout.grid, layout.times, layout.expansion
    if grid is None:
        return "times without a grid" if times is not None or layout.continues else None
    size = math.prod(grid)
    if min(grid) < 1 or any(count != (size if token == placeholder else 1) for token, count in expansion):
        return f"a grid of {list(grid)} for {layout.num_encoder_tokens} encoder tokens"
    if times is not None and (len(times) != grid[0] or max(times) > _LAST_TIME or sorted(times) != times):
        return f"times of {len(times)} pairs that do not rise to {_LAST_TIME} at most, for a grid of {list(grid)}"
    return None


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
        max_rows = info.max_encoder_tokens if info.has_cross_attention else max_model_len
        video = info.row_token_of("video") if "video" in info.media_kinds else None
        placeholder = None if info.is_encoder_decoder else info.placeholder_token_id
        sizes = spec.encoder_width, spec.vocab_size, max_rows
        inputs = OfferCheck(*sizes, placeholder, info.has_cross_attention, video)
        return cls(inputs, (spec.num_layers, *shape), cross_shape, str(dtype).removeprefix("torch."))

    def describe(self, request: Request) -> KvOffer:
        """Return the offer of a prefill whose inputs are all known, without the sender and the attempts."""
        return KvOffer(
            request_id=request.request_id,
            attempt=0,
            num_tokens=request.num_handoff_tokens,
            num_encoder_tokens=request.num_encoder_tokens,
            token_shape=list(self.token_shape),
            cross_shape=list(self.cross_shape),
            dtype=self.dtype,
            layouts=[item.offer.layout for item in request.inputs if item.offer is not None],
            seed=request.seed,
            num_cached_tokens=request.num_cached_tokens,
            sender="",
            deadline_s=0.0,
        )

    def fault(self, offer: KvOffer, request: Request) -> str | None:
        """Return the fault of an offer for this request, with the value; None without a fault."""
        sizes = [list(offer.token_shape), list(offer.cross_shape), offer.dtype]
        expected = [list(self.token_shape), list(self.cross_shape), self.dtype]
        if sizes != expected:
            return f"shapes and dtype {sizes}, expected {expected}: do both serve the same model?"
        if len(offer.layouts) != len(request.inputs):
            return f"{len(offer.layouts)} input layouts, the request has {len(request.inputs)} inputs"
        for item, layout in zip(request.inputs, offer.layouts, strict=True):
            if item.offer is not None and item.offer.layout != layout:
                fault: str | None = "it has been offered with another layout"
            else:
                fault = self.inputs.fault(self.input_offer(item, layout))
            if fault is not None:
                return f"input {item.slot.input_id}: {fault}"
        rows = sum(layout.num_encoder_tokens for layout in offer.layouts) if request.cross_attention else 0
        if offer.num_encoder_tokens != rows:
            return f"{offer.num_encoder_tokens} encoder tokens, the layouts have {rows}"
        num_tokens = _num_handoff_tokens(request, offer.layouts)
        if offer.num_tokens != num_tokens:
            return f"keys and values of {offer.num_tokens} tokens, the request needs those of {num_tokens}"
        return None

    def input_offer(self, item: RequestInput, layout: InputLayout) -> Offer:
        """Return the offer, made by nobody, of an input that was prefilled elsewhere."""
        slot, shape = item.slot, [layout.num_encoder_tokens, self.inputs.hidden_size]
        size_bytes = math.prod(shape) * DTYPES[self.dtype].itemsize
        return Offer("", slot.input_id, 0, slot.content_hash, slot.kind, shape, self.dtype, size_bytes, layout, "", 0.0)

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
