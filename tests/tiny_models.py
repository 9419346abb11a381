"""Small random checkpoints of every supported family: ordinary Hugging Face folders, equal for equal seeds.

Nothing is downloaded.

Each `make_*` writes config, generation config, weights, tokenizer and (where there is media) preprocessor to `folder`
and returns it. The weights are drawn wide enough that greedy outputs vary from token to token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

CHAT_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION_SPECIALS = (*CHAT_SPECIALS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
LANGUAGES = ("en", "de", "fr")
FIRST_SPECIAL = 256
"""Ids below are bytes; the special tokens of a family follow in the order above."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Llama: grouped-query attention, tied embeddings, as SmolLM2 has them. `overrides` go to the config."""
    config = LlamaConfig(**{**text_config(tie_word_embeddings=True), **overrides})
    save_random(LlamaForCausalLM(config), folder, seed)
    save_generation(folder, eos_token_id=FIRST_SPECIAL + 2, pad_token_id=FIRST_SPECIAL, bos_token_id=FIRST_SPECIAL)
    return save_chat_tokenizer(folder, CHAT_SPECIALS)


def make_qwen2(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Qwen2: biases on q, k and v, an output head of its own. `overrides` go to the config."""
    config = Qwen2Config(**{**text_config(tie_word_embeddings=False), **overrides})
    save_random(Qwen2ForCausalLM(config), folder, seed)
    save_generation(folder, eos_token_id=[FIRST_SPECIAL + 2, FIRST_SPECIAL], pad_token_id=FIRST_SPECIAL)
    return save_chat_tokenizer(folder, CHAT_SPECIALS)


def make_qwen2_5_vl(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Qwen2.5-VL: dynamic resolution, window attention, M-RoPE. Pictures of up to 196 x 196 pixels: 49 tokens."""
    text = text_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [2],
        "window_size": 56,
    }
    ids = {token: FIRST_SPECIAL + index for index, token in enumerate(VISION_SPECIALS)}
    config = Qwen2_5_VLConfig(
        text_config={**text, **overrides},
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    save_random(Qwen2_5_VLForConditionalGeneration(config), folder, seed)
    save_generation(folder, eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"])
    write_json(
        folder / "preprocessor_config.json",
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 28 * 28, "max_pixels": 196 * 196},
    )
    return save_chat_tokenizer(folder, VISION_SPECIALS)


def make_whisper(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Whisper, multilingual (three languages), 30 s clips, all 1501 timestamps. `overrides` go to the config."""
    tokens = _whisper_specials()
    ids = {token: FIRST_SPECIAL + index for index, token in enumerate(tokens)}
    settings = {
        "vocab_size": FIRST_SPECIAL + len(tokens),
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_target_positions": 96,
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    model = WhisperForConditionalGeneration(WhisperConfig(**{**settings, **overrides}))
    save_random(model, folder, seed, quiet_tokens=slice(ids["<|0.00|>"], None))
    save_generation(folder, **_whisper_generation(ids))
    write_json(
        folder / "preprocessor_config.json",
        {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": model.config.num_mel_bins,
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 30,
        },
    )
    byte_tokenizer(tokens, first_plain="<|0.00|>").save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


def text_config(**more: Any) -> dict[str, Any]:
    """The sizes of a tiny text decoder, by transformers' names."""
    return {
        "vocab_size": FIRST_SPECIAL + 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": FIRST_SPECIAL,
        "eos_token_id": FIRST_SPECIAL + 2,
        "pad_token_id": FIRST_SPECIAL,
        **more,
    }


def _whisper_specials() -> list[str]:
    timestamps = [f"<|{index * 0.02:.2f}|>" for index in range(1501)]
    tasks = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    return [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{language}|>" for language in LANGUAGES),
        *tasks,
        *timestamps,
    ]


def _whisper_generation(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "is_multilingual": True,
        "lang_to_id": {f"<|{language}|>": ids[f"<|{language}|>"] for language in LANGUAGES},
        "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "begin_suppress_tokens": [ord(" "), ids["<|endoftext|>"]],
        "suppress_tokens": [1, 2, 7, ids["<|startofprev|>"], ids["<|nospeech|>"]],
        "max_length": 96,
        "return_timestamps": False,
    }


@torch.no_grad()
def save_random(model: PreTrainedModel, folder: Path, seed: int, *, quiet_tokens: slice | None = None) -> None:
    """Fill the model from its own generator, so that no other code's random numbers matter, and save it.

    `quiet_tokens` get small embeddings: they rarely win, but they can.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name or "ln_q" in name:
            parameter.copy_(0.1 * noise + (1.0 if name.endswith("weight") else 0.0))
        elif parameter.numel() == 1:  # a gate, wide enough that what it lets through matters
            parameter.copy_(0.1 * noise + 0.7)
        elif parameter.ndim == 1:
            parameter.copy_(0.1 * noise)
        elif "embed_positions" in name:
            parameter.copy_(0.3 * noise)
        elif "embed_tokens" in name or "shared" in name:  # small, or tied heads repeat the last token
            parameter.copy_(0.15 * noise)
        else:  # attention over 1500 near-equal frames needs sharper scores to depend on the frames
            gain = 4.0 if "encoder_attn.q_proj" in name or "encoder_attn.k_proj" in name else 2.0
            parameter.copy_(gain * noise / parameter[0].numel() ** 0.5)
    if quiet_tokens is not None:
        model.get_input_embeddings().weight[quiet_tokens] *= 0.3
    model.save_pretrained(folder)


def save_generation(folder: Path, **settings: Any) -> None:
    """Write generation_config.json."""
    GenerationConfig(**settings).save_pretrained(folder)


def save_chat_tokenizer(folder: Path, specials: tuple[str, ...]) -> Path:
    """Write a byte tokenizer with `specials` and a chat template; the end of a turn ends an answer."""
    byte_tokenizer(specials).save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def byte_tokenizer(added: list[str] | tuple[str, ...], first_plain: str | None = None) -> Tokenizer:
    """One token per byte, then `added`; those from `first_plain` on are not special (Whisper's timestamps)."""
    vocab = {symbol: index for index, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    plain_from = added.index(first_plain) if first_plain else len(added)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added[:plain_from]])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in added[plain_from:]])
    return tokenizer


def _byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes, in byte order, as GPT-2's byte-level BPE has them."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True))


if __name__ == "__main__":  # for a long run with sounds
    make_whisper(Path(sys.argv[1]), max_target_positions=160)
