"""The decode worker: decodes prompts prefilled elsewhere."""

from __future__ import annotations

from typing import ClassVar

from common.messages import Generate, Role
from services.roles.decoder import DecoderService


class DecodeService(DecoderService):
    """Takes keys and values from prefill workers, and inputs from encoders where a request has to be computed again."""

    role: ClassVar[Role] = "decode"

    def _refusal(self, message: Generate) -> str | None:
        return None if message.prefilled else "the prompt has to be prefilled elsewhere, send it with `prefilled`"
