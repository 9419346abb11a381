"""Checks of an offered input, complete before the offer is accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.messages import Offer
from common.model_info import ModelInfo
from engine.state.spec import DecoderSpec


@dataclass(frozen=True)
class OfferCheck:
    """Sizes of the model for offers. `placeholder` is None for inputs outside the prompt.

    With `cross_attention` a placeholder stays one token, however many rows the encoder has for it.
    """

    hidden_size: int
    vocab_size: int
    max_rows: int
    placeholder: int | None
    cross_attention: bool = False

    @classmethod
    def of(cls, info: ModelInfo, spec: DecoderSpec, max_model_len: int) -> OfferCheck:
        """Of a loaded model, served with a context of `max_model_len` tokens."""
        max_rows = info.max_encoder_tokens if info.has_cross_attention else max_model_len
        return cls(spec.encoder_width, spec.vocab_size, max_rows, info.placeholder_token_id, info.has_cross_attention)

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
        if any(n < 1 or not (0 <= token < self.vocab_size or token == self.placeholder) for token, n in expansion):
            return f"an expansion with a count below 1 or a token id outside the vocabulary of {self.vocab_size}"
        if self.cross_attention:
            good = list(expansion) == [(self.placeholder, 1)] and layout.grid is None
            return None if good else f"an expansion of {len(expansion)} runs, expected the placeholder itself"
        placeholders = sum(count for token, count in expansion if token == self.placeholder)
        if placeholders != rows or sum(count for _, count in expansion) > self.max_rows:
            return f"{placeholders} placeholders in the expansion for {rows} encoder tokens"
        if layout.grid is not None and (min(layout.grid) < 1 or math.prod(layout.grid) != rows or len(expansion) != 1):
            return f"a grid of {list(layout.grid)} for {rows} encoder tokens"
        return None
