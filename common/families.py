"""The table of supported model families: what every process has to know of one, without importing torch.

A family names the classes of its three panels by path, so that each process imports only its own:

    processor   numpy only; runs in the preprocessing children of an encoder worker
    encoder     torch and transformers; runs in an encoder worker
    decoder     torch; runs in a prefill-decode worker
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final, Literal

from common.errors import TriptychError

MediaKind = Literal["image", "audio", "text"]


@dataclass(frozen=True)
class Family:
    """One family. Paths are `module:attribute`; keys are names in config.json.

    media_kind          what the encoder takes; None for a text-only model
    is_encoder_decoder  exactly one input per request, which the decoder reaches by cross-attention alone
    cross_attention     the decoder reads inputs by cross-attention instead of by replaced embeddings
    placeholder         key of the token that stands for one media item in a prompt; empty where prompts have none
    decoder_length      key of the longest decoder sequence, in tokens
    encoder_length      key of the longest encoder output of one input, in rows; empty: as long as the context
    """

    name: str
    architectures: tuple[str, ...]
    decoder: str
    encoder: str = ""
    processor: str = ""
    media_kind: MediaKind | None = None
    is_encoder_decoder: bool = False
    cross_attention: bool = False
    placeholder: str = ""
    decoder_length: str = "max_position_embeddings"
    encoder_length: str = ""


FAMILIES: Final[tuple[Family, ...]] = (
    Family("llama", ("LlamaForCausalLM",), decoder="engine.models.llama:build"),
    Family("qwen2", ("Qwen2ForCausalLM",), decoder="engine.models.llama:build"),
    Family("qwen3", ("Qwen3ForCausalLM",), decoder="engine.models.llama:build"),
    Family(
        "qwen2_5_vl",
        ("Qwen2_5_VLForConditionalGeneration",),
        decoder="engine.models.llama:build",
        encoder="engine.encoders.qwen2_5_vl:Qwen2_5_VLEncoder",
        processor="engine.processors.qwen_vl:QwenVLProcessor",
        media_kind="image",
        placeholder="image_token_id",
    ),
    Family(
        "whisper",
        ("WhisperForConditionalGeneration",),
        decoder="engine.models.whisper:build",
        encoder="engine.encoders.whisper:WhisperEncoder",
        processor="engine.processors.whisper:WhisperProcessor",
        media_kind="audio",
        is_encoder_decoder=True,
        cross_attention=True,
        decoder_length="max_target_positions",
        encoder_length="max_source_positions",
    ),
)


def find_family(architecture: str) -> Family:
    """The family of an architecture. Raises TriptychError("model_not_found") with the closest name and all of them."""
    by_architecture = {name: family for family in FAMILIES for name in family.architectures}
    if architecture in by_architecture:
        return by_architecture[architecture]
    close = difflib.get_close_matches(architecture, by_architecture, n=1)
    hint = f"; the closest is {close[0]}" if close else ""
    known = ", ".join(sorted(by_architecture))
    raise TriptychError(
        "model_not_found", f"architecture {architecture} is not supported{hint}; supported: {known}", "model"
    )
