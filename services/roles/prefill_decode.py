"""The worker that prefills and decodes, alone or with the encoder in the same process."""

from __future__ import annotations

from typing import ClassVar

from common.messages import Generate, Role
from services.roles.decoder import DecoderService


class PrefillDecodeService(DecoderService):
    """Takes inputs from encoders; with `Settings.encoder_fallback` it encodes where there are none."""

    role: ClassVar[Role] = "prefill_decode"
    may_encode = True

    def _refusal(self, message: Generate) -> str | None:
        if message.prefill_for or message.prefilled:
            return "it prefills and decodes a request as a whole"
        return None


class EncodePrefillDecodeService(PrefillDecodeService):
    """All three stages in one process: the form that every other topology is compared with."""

    role: ClassVar[Role] = "encode_prefill_decode"
    always_encodes = True
