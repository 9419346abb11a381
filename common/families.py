"""The table of supported model families, for every process, without importing torch.

A family names the classes of its three panels by path, so that each process imports only its own:

    processor   numpy only; runs in the preprocessing children of an encoder worker
    encoder     torch and transformers; runs in an encoder worker
    decoder     torch; runs in a prefill-decode worker
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from common.errors import TriptychError

MediaKind = Literal["image", "audio", "text", "video"]


@dataclass(frozen=True)
class Family:
    """A family of models. Paths are `module:attribute`; keys are names in config.json.

    media_kind          what the encoder takes; None for a text-only model
    is_encoder_decoder  exactly one input per request, which the decoder reaches by cross-attention alone
    cross_attention     the decoder reads inputs by cross-attention instead of by replaced embeddings
    placeholder         key of the token that stands for one media item in a prompt; empty where prompts have none
    video               processor of videos, for the same encoder; empty where the family takes none. The key of their
                        placeholder is `video_token_id`
    frames_as_images    a video is read as images with text between them; its placeholder is no token of the vocabulary
    placeholder_text    what templates and users write for an item, and the text with the placeholder in its place
    decoder_length      key of the longest decoder sequence, in tokens
    encoder_length      key of the longest encoder output of one input, in rows; empty: as long as the context
    encoder_tiles       every encoder output has rows for all tiles that the vision model takes, filled or not (Mllama)
    default_length      tokens of the longest sequence where `decoder_length` is not in config.json
    reads_text          the encoder reads the text of a prompt beside its one media item (Florence-2)
    prompt_bos          key of the token that follows the decoder start token in a default decoder prompt, where
                        generation_config.json forces no first token
    """

    name: str
    architectures: tuple[str, ...]
    decoder: str = "engine.models.llama:build"
    encoder: str = ""
    processor: str = ""
    media_kind: MediaKind | None = None
    is_encoder_decoder: bool = False
    cross_attention: bool = False
    placeholder: str = ""
    video: str = ""
    frames_as_images: bool = False
    placeholder_text: tuple[str, str] | None = None
    decoder_length: str = "max_position_embeddings"
    encoder_length: str = ""
    encoder_tiles: bool = False
    default_length: int | None = None
    reads_text: bool = False
    prompt_bos: str = ""


_SEES: Final = partial(Family, media_kind="image")
_HEARS: Final = partial(Family, media_kind="audio")
_QWEN_VL: Final = partial(
    _SEES,
    processor="engine.processors.qwen_vl:QwenVLProcessor",
    placeholder="image_token_id",
    video="engine.processors.qwen_video:QwenVideoProcessor",
)
_TRANSLATES: Final = partial(
    Family,
    processor="engine.processors.text:TextTokensProcessor",
    media_kind="text",
    is_encoder_decoder=True,
    cross_attention=True,
)
FAMILIES: Final[tuple[Family, ...]] = (
    Family("llama", ("LlamaForCausalLM",)),
    Family("qwen2", ("Qwen2ForCausalLM",)),
    Family("qwen3", ("Qwen3ForCausalLM",)),
    Family("mistral", ("MistralForCausalLM",)),
    Family("gemma3_text", ("Gemma3ForCausalLM",), decoder="engine.models.gemma3:Gemma3Decoder"),
    _SEES(
        "gemma3",
        ("Gemma3ForConditionalGeneration",),
        decoder="engine.models.gemma3:Gemma3Decoder",
        encoder="engine.encoders.gemma3:Gemma3Encoder",
        processor="engine.processors.gemma3:Gemma3Processor",
        placeholder="image_token_index",
        # As the processor of transformers writes an image: the line breaks merge with those of the text around it.
        placeholder_text=("<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"),
    ),
    _QWEN_VL(
        "qwen2_5_vl", ("Qwen2_5_VLForConditionalGeneration",), encoder="engine.encoders.qwen_vl:Qwen2_5_VLEncoder"
    ),
    _SEES(
        "llava",
        ("LlavaForConditionalGeneration",),
        encoder="engine.encoders.llava:LlavaEncoder",
        processor="engine.processors.llava:LlavaProcessor",
        placeholder="image_token_index",
    ),
    _SEES(
        "llava_next",
        ("LlavaNextForConditionalGeneration",),
        encoder="engine.encoders.llava_next:LlavaNextEncoder",
        processor="engine.processors.llava_next:LlavaNextProcessor",
        placeholder="image_token_index",
    ),
    _SEES(
        "idefics3",
        ("Idefics3ForConditionalGeneration",),
        encoder="engine.encoders.idefics3:Idefics3Encoder",
        processor="engine.processors.idefics3:Idefics3Processor",
        placeholder="image_token_id",
    ),
    _SEES(
        "smolvlm",
        ("SmolVLMForConditionalGeneration",),
        encoder="engine.encoders.idefics3:Idefics3Encoder",
        processor="engine.processors.idefics3:Idefics3Processor",
        placeholder="image_token_id",
        video="engine.processors.frame_video:FrameVideoProcessor",
        frames_as_images=True,
    ),
    _QWEN_VL("qwen2_vl", ("Qwen2VLForConditionalGeneration",), encoder="engine.encoders.qwen_vl:Qwen2VLEncoder"),
    _QWEN_VL(
        "qwen3_vl",
        ("Qwen3VLForConditionalGeneration",),
        decoder="engine.models.qwen3_vl:Qwen3VLDecoder",
        encoder="engine.encoders.qwen_vl:Qwen3VLEncoder",
    ),
    _HEARS(
        "qwen2_audio",
        ("Qwen2AudioForConditionalGeneration",),
        encoder="engine.encoders.qwen2_audio:Qwen2AudioEncoder",
        processor="engine.processors.qwen2_audio:Qwen2AudioProcessor",
        placeholder="audio_token_index",
    ),
    _HEARS(
        "qwen3_asr",
        ("Qwen3ASRForConditionalGeneration",),
        encoder="engine.encoders.qwen3_asr:Qwen3ASREncoder",
        processor="engine.processors.qwen3_asr:Qwen3ASRProcessor",
        placeholder="audio_token_id",
    ),
    _SEES(
        "mllama",
        ("MllamaForConditionalGeneration",),
        decoder="engine.models.mllama:MllamaDecoder",
        encoder="engine.encoders.mllama:MllamaEncoder",
        processor="engine.processors.mllama:MllamaProcessor",
        cross_attention=True,
        encoder_tiles=True,
        placeholder="image_token_index",
    ),
    _HEARS(
        "whisper",
        ("WhisperForConditionalGeneration",),
        decoder="engine.models.whisper:WhisperDecoder",
        encoder="engine.encoders.whisper:WhisperEncoder",
        processor="engine.processors.whisper:WhisperProcessor",
        is_encoder_decoder=True,
        cross_attention=True,
        decoder_length="max_target_positions",
        encoder_length="max_source_positions",
    ),
    _TRANSLATES(
        "bart",
        ("BartForConditionalGeneration", "BartModel"),  # as facebook/bart-base calls itself
        decoder="engine.models.bart:BartDecoder",
        encoder="engine.encoders.text:BartEncoder",
        prompt_bos="bos_token_id",
    ),
    _SEES(
        "florence2",
        ("Florence2ForConditionalGeneration",),
        decoder="engine.models.bart:BartDecoder",
        encoder="engine.encoders.florence2:Florence2Encoder",
        processor="engine.processors.florence2:Florence2Processor",
        is_encoder_decoder=True,
        cross_attention=True,
        placeholder="image_token_id",
        reads_text=True,
    ),
    _TRANSLATES(
        "mbart",
        ("MBartForConditionalGeneration",),
        decoder="engine.models.bart:BartDecoder",
        encoder="engine.encoders.text:BartEncoder",
    ),
    _TRANSLATES(
        "t5",
        ("T5ForConditionalGeneration", "T5WithLMHeadModel"),  # as the first ones still call themselves
        decoder="engine.models.t5:T5Decoder",
        encoder="engine.encoders.text:T5Encoder",
        decoder_length="n_positions",
        default_length=512,  # what T5 was trained on; its relative positions know no limit
    ),
)


def find_family(architecture: str) -> Family:
    """Return the family of an architecture.

    Raises TriptychError("model_not_found") with the supported relatives, and with all that is supported.
    """
    by_architecture = {name: family for family in FAMILIES for name in family.architectures}
    if architecture in by_architecture:
        return by_architecture[architecture]
    relatives = ", ".join(name for name in sorted(by_architecture) if _are_relatives(name, architecture))
    hint = f"; of its kind {relatives} {'are' if ',' in relatives else 'is'}" if relatives else ""
    known = ", ".join(sorted(by_architecture))
    message = f"architecture {architecture} is not supported{hint}; supported: {known}"
    raise TriptychError("model_not_found", message, "model")


def _are_relatives(one: str, other: str) -> bool:
    """Whether names begin alike before any version: Qwen2MoeForCausalLM and Qwen3ForCausalLM, LlavaNext and Llava."""
    stems = sorted((re.split(r"\d|For|Model|LMHead", name)[0].lower() for name in (one, other)), key=len)
    return len(stems[0]) > 2 and stems[1].startswith(stems[0])
