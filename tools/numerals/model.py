"""The tokenizer and the configuration of numerals, an unchanged BART."""

from __future__ import annotations

from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig, PreTrainedTokenizerFast

from tools.numerals.words import MORPHEMES

BOS, PAD, EOS = range(3)
MAX_LENGTH: Final = 128
_IDS: Final = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": EOS}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE behind a split at digits and number words; text in lower case, spaces single.

    Each digit is a token, and each morpheme of a number, joined or after a space.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    longest_first = "|".join(sorted(MORPHEMES, key=len, reverse=True))
    pattern = Regex(rf" ?({longest_first})|\d")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,  # more than there are merges: each morpheme ends as one token
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([f"{space}{word}" for space in ("", "x ") for word in MORPHEMES], trainer)
    ends = [("<s>", BOS), ("</s>", EOS)]
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=MAX_LENGTH
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> BartForConditionalGeneration:
    """Return fresh weights: three layers each of encoder and decoder, 128 wide."""
    torch.manual_seed(seed)
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=128,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=MAX_LENGTH,
        dropout=0.0,
        init_std=0.06,
        forced_eos_token_id=None,
        **_IDS,
    )
    model = BartForConditionalGeneration(config)
    model.generation_config = GenerationConfig(forced_bos_token_id=BOS, do_sample=False, max_new_tokens=48, **_IDS)
    return model
