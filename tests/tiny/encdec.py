"""Encoder-decoder models of text: BART, mBART, T5 and Flan-T5.

The special tokens have the ids that they have in the published checkpoints: those of the examples in the documents.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.tiny_models import save_generation, save_random, write_json

BOS, PAD, EOS = 0, 1, 2
"""Of BART and mBART."""
T5_PAD, T5_EOS = 0, 1
FIRST_BYTE = 3
FIRST_LANGUAGE = FIRST_BYTE + 256
LANGUAGES = ("en_XX", "de_DE", "fr_XX")
VOCAB_SIZE = FIRST_LANGUAGE + 5  # a little more than the tokenizer has, as in published checkpoints

BART_GAINS = {
    r"encoder_attn\.q_proj": 0.125,
    r"encoder_attn\.out_proj": 0.1,
    r"decoder.*fc2\.weight": 2.0,
    r"decoder.*embed_positions": 4.0,
}
_MBART_GAINS = {
    r"encoder_attn\.q_proj": 0.125,
    r"encoder_attn\.out_proj": 0.5,
    r"decoder.*fc2\.weight": 4.0,
    r"decoder.*embed_positions": 3.0,
}
_T5_GAINS = {r"Attention\.q": 0.2, r"EncDecAttention\.o": 0.3, r"decoder.*DenseReluDense\.wo": 3.0}


def make_bart(folder: Path, *, seed: int = 0, generation: dict[str, Any] | None = None, **overrides: Any) -> Path:
    """BART: norms after the residuals, a tied head with a bias. `generation` goes to generation_config.json."""
    model = BartForConditionalGeneration(BartConfig(**{**bart_config(), **overrides}))
    model.final_logits_bias.copy_(0.1 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed + 1)))
    model.final_logits_bias[0, EOS] += 1.0  # some answers end before they must
    save_scaled(model, folder, seed, BART_GAINS)
    ids = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": EOS}
    save_generation(folder, **{**ids, **(generation or {})})
    return save_tokenizer(folder, ("<s>", "<pad>", "</s>"), "<s> $A </s>")


def make_mbart(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """mBART-50: norms before the blocks and a last one, scaled embeddings; answers are in German."""
    settings = {**bart_config(), "scale_embedding": True, "activation_function": "relu", **overrides}
    save_scaled(MBartForConditionalGeneration(MBartConfig(**settings)), folder, seed, _MBART_GAINS)
    save_generation(
        folder,
        bos_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=EOS,
        forced_bos_token_id=FIRST_LANGUAGE + 1,
    )
    return save_tokenizer(folder, ("<s>", "<pad>", "</s>"), "en_XX $A </s>", LANGUAGES)


def make_t5(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """T5: relu, a tied head behind a scale, heads that do not add up to the hidden size."""
    save_scaled(T5ForConditionalGeneration(T5Config(**{**_t5_config(), **overrides})), folder, seed, _T5_GAINS)
    save_generation(folder, pad_token_id=T5_PAD, eos_token_id=T5_EOS, decoder_start_token_id=T5_PAD)
    return save_tokenizer(folder, ("<pad>", "</s>", "<unk>"), "$A </s>")


def make_flan_t5(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Flan-T5: a gated MLP, more layers in the encoder than in the decoder, a head of its own without a scale."""
    make_t5(folder, seed=seed, **{"feed_forward_proj": "gated-gelu", "num_layers": 3, **overrides})
    # What transformers saves today says that the head is tied; published checkpoints say that it is not, and it is not.
    config = json.loads((folder / "config.json").read_text())
    for key in ("scale_decoder_outputs", "dense_act_fn", "is_gated_act"):
        del config[key]
    write_json(folder / "config.json", {**config, "tie_word_embeddings": False})
    tensors = load_file(folder / "model.safetensors")
    shape = tensors["shared.weight"].shape
    head = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)) / shape[1] ** 0.5
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_scaled(model: PreTrainedModel, folder: Path, seed: int, gains: dict[str, float]) -> None:
    """Random weights, scaled by `gains` (patterns of names) so that decoders listen to their own tokens more than to
    the encoder, and attention looks at several tokens: sums in another order must not change what comes out."""
    save_random(model, folder, seed)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        for pattern, gain in gains.items():
            if re.search(pattern, name):
                tensor *= gain
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def bart_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "max_position_embeddings": 128,
        "decoder_start_token_id": EOS,
        "forced_eos_token_id": None,
    }


def _t5_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "d_kv": 24,
        "d_ff": 96,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 16,
        "relative_attention_max_distance": 40,
        "n_positions": 128,
        "decoder_start_token_id": T5_PAD,
    }


def save_tokenizer(folder: Path, specials: tuple[str, ...], template: str, more: tuple[str, ...] = ()) -> Path:
    """A byte tokenizer: `specials`, one token per byte, `more` specials; `template` is what encoding a text adds."""
    symbols = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *more]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*specials, *more)])
    added = [token for token in template.split() if token != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, symbols.index(token)) for token in added]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder
