"""Vision-language models over a Llama decoder: LLaVA-1.5 (with CLIP or SigLIP) and Idefics3 with SmolVLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    MistralConfig,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from tests.tiny_models import (
    CHAT_SPECIALS,
    FIRST_SPECIAL,
    byte_tokenizer,
    save_generation,
    save_random,
    text_config,
    write_json,
)

LLAVA_SPECIALS = (*CHAT_SPECIALS, "<image>")
PIECE_SPECIALS = (
    *CHAT_SPECIALS,
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
IMAGE_TOKEN_ID = FIRST_SPECIAL + 3
PIECE_FIRST_SPECIAL = FIRST_SPECIAL + 1
"""After the bytes and the double line break."""
PIECE_IMAGE_TOKEN_ID = PIECE_FIRST_SPECIAL + 3
LLAVA_SIDE, LLAVA_PATCH = 42, 7
PIECE_SIDE, PIECE_PATCH, LONGEST_EDGE = 28, 7, 84
"""Pixels: a picture has up to nine pieces and the whole, four tokens each after the pixel shuffle."""

VIDEO_SAMPLING = {"fps": 2, "max_frames": 6, "video_size": {"longest_edge": 56}}
"""As published folders have it; transformers takes the size of images instead."""

# Parts only, as the published templates of these models: a message that is one string would come out empty.
_LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}: "
    "{% for part in message.content if part.type == 'image' %}<image>\n{% endfor %}"
    "{% for part in message.content if part.type == 'text' %}{% generation %}{{ part.text }} {% endgeneration %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_PIECES_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}:"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %} {{ part.text }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def make_llava(folder: Path, *, seed: int = 0, siglip: bool = False, **overrides: Any) -> Path:
    """LLaVA-1.5: CLIP's last layer but one without its class token, 36 tokens per picture. `overrides` go to the
    config. With `siglip`, every patch of its last layer, as LLaVA-Interleave has it.
    """
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": LLAVA_SIDE,
        "patch_size": LLAVA_PATCH,
    }
    vision = SiglipVisionConfig(**sizes, vision_use_head=False) if siglip else CLIPVisionConfig(**sizes)
    settings = {
        "vision_feature_layer": -1 if siglip else -2,
        "vision_feature_select_strategy": "full" if siglip else "default",
        "image_token_index": IMAGE_TOKEN_ID,
        "image_seq_length": (LLAVA_SIDE // LLAVA_PATCH) ** 2,
    }
    text = LlamaConfig(**text_config(tie_word_embeddings=False))
    config = LlavaConfig(vision_config=vision, text_config=text, **{**settings, **overrides})
    save_random(LlavaForConditionalGeneration(config), folder, seed)
    size: dict[str, int] = {"height": LLAVA_SIDE, "width": LLAVA_SIDE}
    preprocessor: dict[str, Any] = {"image_processor_type": "SiglipImageProcessor", "size": size}
    if not siglip:
        preprocessor = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": LLAVA_SIDE},
            "crop_size": size,
        }
    write_json(folder / "preprocessor_config.json", preprocessor)
    return _save_rest(folder, byte_tokenizer(LLAVA_SPECIALS).to_str(), _LLAVA_TEMPLATE)


def make_llava_next(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """LLaVA-NeXT over Mistral: up to four tiles of 28 pixels, 16 tokens each. `overrides` go to the config."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=PIECE_SIDE, patch_size=PIECE_PATCH)
    grid = [[28, 56], [56, 28], [56, 56], [84, 28]]
    text = MistralConfig(**text_config(tie_word_embeddings=False, sliding_window=None))
    settings = {"image_token_index": IMAGE_TOKEN_ID, "image_grid_pinpoints": grid, "tie_word_embeddings": False}
    config = LlavaNextConfig(vision_config=vision, text_config=text, **{**settings, **overrides})
    save_random(LlavaNextForConditionalGeneration(config), folder, seed)
    preprocessor = {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": PIECE_SIDE},
        "crop_size": {"height": PIECE_SIDE, "width": PIECE_SIDE},
        "image_grid_pinpoints": grid,
    }
    write_json(folder / "preprocessor_config.json", preprocessor)
    return _save_rest(folder, byte_tokenizer(LLAVA_SPECIALS).to_str(), _LLAVA_TEMPLATE)


def make_idefics3(folder: Path, *, seed: int = 0, smolvlm: bool = False, **overrides: Any) -> Path:
    """Idefics3, or SmolVLM: pieces of 28 pixels, four tokens each. `overrides` go to the config."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": PIECE_SIDE,
        "patch_size": PIECE_PATCH,
    }
    text = text_config(
        tie_word_embeddings=False,
        vocab_size=PIECE_FIRST_SPECIAL + len(PIECE_SPECIALS),
        bos_token_id=PIECE_FIRST_SPECIAL,
        eos_token_id=PIECE_FIRST_SPECIAL + 2,
        pad_token_id=PIECE_FIRST_SPECIAL,
    )
    if smolvlm:  # room for videos, whose texts have a token for each byte
        text["max_position_embeddings"] = 2048
    settings: dict[str, Any] = {
        "vision_config": vision,
        "text_config": LlamaConfig(**text),
        "scale_factor": 2,
        "image_token_id": PIECE_IMAGE_TOKEN_ID,
        "tie_word_embeddings": False,
        **overrides,
    }
    if smolvlm:
        save_random(SmolVLMForConditionalGeneration(SmolVLMConfig(**settings)), folder, seed)
    else:
        save_random(Idefics3ForConditionalGeneration(Idefics3Config(**settings)), folder, seed)
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "SmolVLMImageProcessor" if smolvlm else "Idefics3ImageProcessor",
            "size": {"longest_edge": LONGEST_EDGE},
            "max_image_size": {"longest_edge": PIECE_SIDE},
            "do_image_splitting": True,
            **({"video_sampling": VIDEO_SAMPLING} if smolvlm else {}),
        },
    )
    write_json(folder / "processor_config.json", {"image_seq_len": 4})
    return _save_rest(folder, _pieces_tokenizer(), _PIECES_TEMPLATE, first_special=PIECE_FIRST_SPECIAL)


def _pieces_tokenizer() -> str:
    """Two line breaks are one token, as in the tokenizers of the published models."""
    tokenizer = json.loads(byte_tokenizer(()).to_str())
    line_break = chr(256 + ord("\n"))  # its printable stand-in
    tokenizer["model"]["vocab"][line_break * 2] = FIRST_SPECIAL
    tokenizer["model"]["merges"] = [[line_break, line_break]]
    with_specials = Tokenizer.from_str(json.dumps(tokenizer))
    with_specials.add_special_tokens([AddedToken(token, special=True) for token in PIECE_SPECIALS])
    return str(with_specials.to_str())


def _save_rest(folder: Path, tokenizer_json: str, template: str, first_special: int = FIRST_SPECIAL) -> Path:
    save_generation(folder, eos_token_id=first_special + 2, pad_token_id=first_special, bos_token_id=first_special)
    (folder / "tokenizer.json").write_text(tokenizer_json)
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
    write_json(folder / "chat_template.json", {"chat_template": template})
    return folder
