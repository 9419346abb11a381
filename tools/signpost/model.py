"""Signpost's configuration, tokenizer and fresh weights, and its folder on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from tools.checkpoint import save_checkpoint
from tools.signpost.scenes import COLOURS, QUESTIONS, SHAPES

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen2.5-VL's template without its default system prompt.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' or 'image' in c or 'image_url' in c %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' or 'video' in c %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "min_pixels": 3136,
    "max_pixels": 50176,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
PLACES = ("first", "second")
PLACED_QUESTIONS: dict[str, tuple[str, ...]] = {
    "text": (
        "What does the {place} sign say?",
        "What does the sign in the {place} picture say?",
        "Read the sign in the {place} picture.",
    ),
    "colour": ("What colour is the {place} sign?", "What colour is the sign in the {place} picture?"),
    "shape": ("What shape is the {place} sign?", "What shape is the sign in the {place} picture?"),
    "circles": ("How many circles are there in the {place} picture?", "Count the circles in the {place} picture."),
}
_VOCABULARY = 448
_TEXT_LAYERS, _VISION_LAYERS = 4, 5


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges from the questions and answers in lower case alone.

    So a word of a question is mostly one token and a sign's text (capitals, digits) is one token a character.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_tokenizer_corpus(), trainer)
    bpe.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _tokenizer_corpus() -> list[str]:
    plain = [question for wordings in QUESTIONS.values() for question in wordings]
    placed = [text.format(place=place) for texts in PLACED_QUESTIONS.values() for text in texts for place in PLACES]
    return (plain + placed + list(COLOURS) + list(SHAPES) + ["user\nassistant\nsystem\n"]) * 5


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """Qwen2.5-VL at 5.35 M parameters: 2.87 M in the vision tower and 2.48 M in the language model."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": _VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": _TEXT_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        },
        vision_config={
            "depth": _VISION_LAYERS,
            "hidden_size": 192,
            "intermediate_size": 384,
            "num_heads": 6,
            "out_hidden_size": 256,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [2, 4],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Fresh weights: normal with variance 1 / fan-in, smaller where a layer adds to the residual stream."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(make_config(tokenizer))
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, 0.0, _initial_deviation(name, parameter))
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.text_config.bos_token_id,
        eos_token_id=model.config.text_config.eos_token_id,
        pad_token_id=model.config.text_config.pad_token_id,
        max_new_tokens=16,
        do_sample=False,
    )
    return model


def _initial_deviation(name: str, parameter: torch.Tensor) -> float:
    if "embed_tokens" in name:
        return 0.05
    deviation = 1 / math.sqrt(parameter[0].numel())
    if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")):
        deviation /= math.sqrt(2 * (_TEXT_LAYERS if "language_model" in name else _VISION_LAYERS))
    return deviation


def save_folder(model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bfloat16, tokenizer, chat template and image processor as an ordinary transformers folder."""
    classes = {"tokenizer_class": "Qwen2TokenizerFast", "processor_class": "Qwen2_5_VLProcessor"}
    save_checkpoint(model, tokenizer, folder, **classes)
    bpe = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    (folder / "vocab.json").write_text(json.dumps(bpe["vocab"], ensure_ascii=False) + "\n")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=1) + "\n")
