"""Whisper tiny.en from its CTranslate2 form to a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from transformers import WhisperConfig, WhisperFeatureExtractor

from tests.weights.ctranslate2 import Ct2Model, read_ct2

Weights = dict[str, npt.NDArray[np.generic]]

NUM_TIMESTAMPS: Final = 1501
"""<|0.00|> to <|30.00|> in steps of 0.02 s; the last ids of the vocabulary."""
END_OF_TEXT: Final = "<|endoftext|>"


def convert_whisper(source: Path, folder: Path) -> None:
    """Write an English-only checkpoint as a Hugging Face folder.

    `source` holds model.bin, config.json and tokenizer.json as CTranslate2 keeps them.
    """
    model = read_ct2(source / "model.bin")
    if model.spec != "WhisperSpec":
        raise ValueError(f"{source} holds a {model.spec}, expected a WhisperSpec")
    hints = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    token_ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}

    save_file(_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(model, token_ids)
    config.save_pretrained(folder)
    _write_json(folder / "generation_config.json", _generation(config, hints, token_ids))
    extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    extractor.save_pretrained(folder)
    _save_tokenizer(tokenizer, token_ids["<|notimestamps|>"] + 1, folder)


# --- weights


def _weights(model: Ct2Model) -> Weights:
    weights: Weights = {"model.decoder.embed_tokens.weight": model.float("decoder/embeddings/weight")}
    for conv in ("conv1", "conv2"):
        _copy(model, weights, f"encoder/{conv}", f"model.encoder.{conv}")
    for side in ("encoder", "decoder"):
        positions = model.float(f"{side}/position_encodings/encodings")
        weights[f"model.{side}.embed_positions.weight"] = positions
        _copy_norm(model, weights, f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(_num_layers(model, side)):
            _copy_layer(model, weights, f"{side}/layer_{layer}", f"model.{side}.layers.{layer}")
    return {name: np.ascontiguousarray(tensor) for name, tensor in weights.items()}


def _copy_layer(model: Ct2Model, weights: Weights, source: str, target: str) -> None:
    attention = f"{source}/self_attention"
    _copy_stacked(model, weights, f"{attention}/linear_0", [f"{target}.self_attn.{x}_proj" for x in "qkv"])
    _copy(model, weights, f"{attention}/linear_1", f"{target}.self_attn.out_proj")
    _copy_norm(model, weights, f"{attention}/layer_norm", f"{target}.self_attn_layer_norm")
    cross = f"{source}/attention"
    if f"{cross}/linear_0/weight" in model.tensors:  # the decoder's layers only
        _copy(model, weights, f"{cross}/linear_0", f"{target}.encoder_attn.q_proj")
        _copy_stacked(model, weights, f"{cross}/linear_1", [f"{target}.encoder_attn.{x}_proj" for x in "kv"])
        _copy(model, weights, f"{cross}/linear_2", f"{target}.encoder_attn.out_proj")
        _copy_norm(model, weights, f"{cross}/layer_norm", f"{target}.encoder_attn_layer_norm")
    _copy(model, weights, f"{source}/ffn/linear_0", f"{target}.fc1")
    _copy(model, weights, f"{source}/ffn/linear_1", f"{target}.fc2")
    _copy_norm(model, weights, f"{source}/ffn/layer_norm", f"{target}.final_layer_norm")


def _copy(model: Ct2Model, weights: Weights, source: str, target: str) -> None:
    weights[f"{target}.weight"] = model.float(f"{source}/weight")
    weights[f"{target}.bias"] = model.float(f"{source}/bias")


def _copy_norm(model: Ct2Model, weights: Weights, source: str, target: str) -> None:
    weights[f"{target}.weight"] = model.float(f"{source}/gamma")
    weights[f"{target}.bias"] = model.float(f"{source}/beta")


def _copy_stacked(model: Ct2Model, weights: Weights, source: str, targets: list[str]) -> None:
    """CTranslate2 stacks the rows of q, k and v; transformers keeps them apart, k without a bias."""
    parts = np.split(model.float(f"{source}/weight"), len(targets))
    biases = np.split(model.float(f"{source}/bias"), len(targets))
    for target, weight, bias in zip(targets, parts, biases, strict=True):
        weights[f"{target}.weight"] = weight
        if not target.endswith("k_proj"):
            weights[f"{target}.bias"] = bias
        elif bias.any():
            raise ValueError(f"{source} has a bias for k, which transformers' Whisper cannot hold")


def _num_layers(model: Ct2Model, side: str) -> int:
    return sum(
        1 for name in model.tensors if name.startswith(f"{side}/layer_") and name.endswith("ffn/linear_0/weight")
    )


# --- configuration


def _config(model: Ct2Model, token_ids: dict[str, int]) -> WhisperConfig:
    vocab_size, width = model.tensors["decoder/embeddings/weight"].shape
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), token_ids[END_OF_TEXT])
    return WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        dtype="float16",
        vocab_size=vocab_size,
        d_model=width,
        num_mel_bins=model.tensors["encoder/conv1/weight"].shape[1],
        encoder_layers=_num_layers(model, "encoder"),
        decoder_layers=_num_layers(model, "decoder"),
        encoder_attention_heads=int(model.tensors["encoder/num_heads"]),
        decoder_attention_heads=int(model.tensors["decoder/num_heads"]),
        encoder_ffn_dim=model.tensors["encoder/layer_0/ffn/linear_0/weight"].shape[0],
        decoder_ffn_dim=model.tensors["decoder/layer_0/ffn/linear_0/weight"].shape[0],
        max_source_positions=model.tensors["encoder/position_encodings/encodings"].shape[0],
        max_target_positions=model.tensors["decoder/position_encodings/encodings"].shape[0],
        decoder_start_token_id=token_ids["<|startoftranscript|>"],
        **ends,
    )


def _generation(config: WhisperConfig, hints: dict[str, Any], token_ids: dict[str, int]) -> dict[str, Any]:
    return {
        "alignment_heads": hints["alignment_heads"],
        "begin_suppress_tokens": hints["suppress_ids_begin"],
        "bos_token_id": config.bos_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
        "eos_token_id": config.eos_token_id,
        "is_multilingual": False,
        "max_initial_timestamp_index": 50,
        "max_length": config.max_target_positions,
        "no_timestamps_token_id": token_ids["<|notimestamps|>"],
        "pad_token_id": config.pad_token_id,
        "prev_sot_token_id": token_ids["<|startofprev|>"],
        "return_timestamps": False,
        "suppress_tokens": hints["suppress_ids"],
    }


def _save_tokenizer(tokenizer: dict[str, Any], first_timestamp: int, folder: Path) -> None:
    """The package's tokenizer.json lacks the timestamp tokens."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    known = {token["content"] for token in tokenizer["added_tokens"]}
    for index in range(NUM_TIMESTAMPS):
        content = f"<|{index * 0.02:.2f}|>"
        if content not in known:
            tokenizer["added_tokens"].append({"id": first_timestamp + index, "content": content, **flags})
    _write_json(folder / "tokenizer.json", tokenizer)

    bpe = tokenizer["model"]
    _write_json(folder / "vocab.json", bpe["vocab"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    special = [token["content"] for token in tokenizer["added_tokens"] if token["special"]]
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END_OF_TEXT)
    settings = {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "additional_special_tokens": [token for token in special if token != END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        **names,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1))
