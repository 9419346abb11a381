"""Gemma 3: text alone, and with SigLIP before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma3TextConfig

from tests.tiny_models import (
    CHAT_SPECIALS,
    FIRST_SPECIAL,
    byte_tokenizer,
    save_chat_tokenizer,
    save_generation,
    save_random,
    text_config,
    write_json,
)

SIDE, PATCH, NUM_IMAGE_TOKENS = 56, 7, 16
"""Pixels of an image and of a patch; 8 x 8 patches become 4 x 4 tokens."""
IMAGE_SPECIALS: Final = (*CHAT_SPECIALS, "<start_of_image>", "<image_soft_token>", "<end_of_image>")
_FIRST_SPECIAL: Final = FIRST_SPECIAL + 3
"""After the bytes, and two, three and four line breaks in a row."""
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<start_of_image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_gemma3_text(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Six layers, the last without a window of 16 tokens. `overrides` go to the config."""
    save_random(Gemma3ForCausalLM(_text(**overrides)), folder, seed)
    save_generation(folder, eos_token_id=FIRST_SPECIAL + 2, pad_token_id=FIRST_SPECIAL, bos_token_id=FIRST_SPECIAL)
    return save_chat_tokenizer(folder, CHAT_SPECIALS)


def make_gemma3(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """The same behind images of 16 tokens. `overrides` go to the text config."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    first, vocab_size = _FIRST_SPECIAL, _FIRST_SPECIAL + len(IMAGE_SPECIALS)
    ids = {"bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": first}
    config = Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", **vision},
        text_config=_text(vocab_size=vocab_size, **ids, **overrides),
        mm_tokens_per_image=NUM_IMAGE_TOKENS,
        boi_token_index=first + 3,
        image_token_index=first + 4,
        eoi_token_index=first + 5,
    )
    save_random(Gemma3ForConditionalGeneration(config), folder, seed)
    preprocessor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    write_json(folder / "preprocessor_config.json", preprocessor)
    save_generation(folder, **ids)
    (folder / "tokenizer.json").write_text(_tokenizer())
    names = dict(zip(("boi_token", "image_token", "eoi_token"), IMAGE_SPECIALS[3:], strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write_json(folder / "tokenizer_config.json", {**settings, "extra_special_tokens": names})
    write_json(folder / "chat_template.json", {"chat_template": _TEMPLATE})
    return folder


def _text(**overrides: Any) -> Gemma3TextConfig:
    sizes = text_config(tie_word_embeddings=True, head_dim=24, num_hidden_layers=6)
    sizes |= {"sliding_window": 16, "query_pre_attn_scalar": 20, "rope_parameters": None}
    return Gemma3TextConfig(**{**sizes, **overrides})


def _tokenizer() -> str:
    """Line breaks in a row are one token, as in the published tokenizer: those around an image join the text's."""
    tokenizer = json.loads(byte_tokenizer(()).to_str())
    line_break = chr(256 + ord("\n"))  # its printable stand-in
    for count in (2, 3, 4):
        tokenizer["model"]["vocab"][line_break * count] = FIRST_SPECIAL + count - 2
    tokenizer["model"]["merges"] = [[line_break, line_break], [line_break * 2, line_break], [line_break * 2] * 2]
    with_specials = Tokenizer.from_str(json.dumps(tokenizer))
    with_specials.add_special_tokens([AddedToken(token, special=True) for token in IMAGE_SPECIALS])
    return str(with_specials.to_str())
