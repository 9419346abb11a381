"""The further Qwen models that see or hear: Qwen2-VL, Qwen3-VL, Qwen2-Audio and Qwen3-ASR."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3ASRConfig,
    Qwen3ASRForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.tiny_models import (
    CHAT_SPECIALS,
    FIRST_SPECIAL,
    VISION_SPECIALS,
    save_chat_tokenizer,
    save_generation,
    save_random,
    text_config,
    write_json,
)

AUDIO_SPECIALS: Final = (*CHAT_SPECIALS, "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
CLIP_SECONDS: Final = 5
"""Of the tiny Qwen2-Audio's window; the published one's is 30 s."""
_VISION_IDS: Final = {token: FIRST_SPECIAL + index for index, token in enumerate(VISION_SPECIALS)}
_AUDIO_IDS: Final = {token: FIRST_SPECIAL + index for index, token in enumerate(AUDIO_SPECIALS)}
_TOKEN_KEYS: Final = {
    "image_token_id": _VISION_IDS["<|image_pad|>"],
    "video_token_id": _VISION_IDS["<|video_pad|>"],
    "vision_start_token_id": _VISION_IDS["<|vision_start|>"],
    "vision_end_token_id": _VISION_IDS["<|vision_end|>"],
}
_AUDIO_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>\n{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_qwen2_vl(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Qwen2-VL: full attention within each picture. Pictures of up to 196 x 196 pixels: 49 tokens."""
    text = text_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
    vision = {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "hidden_size": text["hidden_size"]}
    config = Qwen2VLConfig(
        text_config={**text, **overrides}, vision_config=vision, tie_word_embeddings=True, **_TOKEN_KEYS
    )
    save_random(Qwen2VLForConditionalGeneration(config), folder, seed)
    write_json(
        folder / "preprocessor_config.json",
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 28 * 28, "max_pixels": 196 * 196},
    )
    return _save_vision_texts(folder)


def make_qwen3_vl(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Qwen3-VL: patches of 16 pixels, interleaved M-RoPE, two deep-stacked outputs. Up to 224 x 224 pixels: 49 tokens.

    `overrides` go to the text config.
    """
    text = text_config(
        head_dim=24,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 3, 3],
            "mrope_interleaved": True,
        },
    )
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 8 * 8,
        "deepstack_visual_indexes": [0, 2],
    }
    config = Qwen3VLConfig(
        text_config={**text, **overrides}, vision_config=vision, tie_word_embeddings=True, **_TOKEN_KEYS
    )
    save_random(Qwen3VLForConditionalGeneration(config), folder, seed)
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 32 * 32, "longest_edge": 224 * 224},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
    return _save_vision_texts(folder)


def make_qwen2_audio(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Qwen2-Audio: a window of 5 s, 25 tokens per second of a clip. `overrides` go to the text config."""
    audio = {
        "num_mel_bins": 40,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "max_source_positions": CLIP_SECONDS * 50,
    }
    text = text_config(model_type="qwen2", tie_word_embeddings=False)
    config = Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", **audio},
        text_config={**text, **overrides},
        audio_token_index=_AUDIO_IDS["<|AUDIO|>"],
    )
    save_random(Qwen2AudioForConditionalGeneration(config), folder, seed)
    save_generation(folder, eos_token_id=_AUDIO_IDS["<|im_end|>"], pad_token_id=_AUDIO_IDS["<|endoftext|>"])
    write_json(
        folder / "preprocessor_config.json",
        {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "Qwen2AudioProcessor",
            "feature_size": audio["num_mel_bins"],
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": CLIP_SECONDS,
            "return_attention_mask": True,
        },
    )
    save_chat_tokenizer(folder, AUDIO_SPECIALS)
    (folder / "chat_template.jinja").write_text(_AUDIO_TEMPLATE)
    return folder


def make_qwen3_asr(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Qwen3-ASR: 13 tokens per second of a clip, and windows of 2 s. `overrides` go to the text config."""
    audio = {
        "num_mel_bins": 40,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "output_dim": text_config()["hidden_size"],
        "downsample_hidden_size": 8,
        "n_window_infer": 200,
    }
    text = text_config(model_type="qwen3", tie_word_embeddings=True, head_dim=24)
    ids = {"eos_token_id": _AUDIO_IDS["<|im_end|>"], "pad_token_id": _AUDIO_IDS["<|endoftext|>"]}
    config = Qwen3ASRConfig(
        audio_config={"model_type": "qwen3_asr_encoder", **audio},
        text_config={**text, **overrides},
        audio_token_id=_AUDIO_IDS["<|AUDIO|>"],
        **ids,
    )
    save_random(Qwen3ASRForConditionalGeneration(config), folder, seed)
    save_generation(folder, **ids)
    settings = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 40}
    write_json(folder / "preprocessor_config.json", settings)
    save_chat_tokenizer(folder, AUDIO_SPECIALS)
    (folder / "chat_template.jinja").write_text(_AUDIO_TEMPLATE)
    return folder


def _save_vision_texts(folder: Path) -> Path:
    save_generation(folder, eos_token_id=_VISION_IDS["<|im_end|>"], pad_token_id=_VISION_IDS["<|endoftext|>"])
    return save_chat_tokenizer(folder, VISION_SPECIALS)
