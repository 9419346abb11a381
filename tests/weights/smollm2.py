"""SmolLM2-135M-Instruct from its GGUF form to a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig

GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_smollm2(source: Path, folder: Path) -> None:
    """Write the checkpoint as a Hugging Face folder in bfloat16. What the 4-bit form lost stays lost."""
    reader = gguf.GGUFReader(source / GGUF_FILE)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(facts)
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name, values = _convert(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type), config)
        weights[name] = torch.from_numpy(values).to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    ends = {f"{name}_token_id": getattr(config, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=1))
    _save_tokenizer(facts, folder)


def _config(facts: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=round(facts["llama.attention.layer_norm_rms_epsilon"], 9),  # stored in single precision
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
    )


def _convert(name: str, values: npt.NDArray[np.float32], config: LlamaConfig) -> tuple[str, npt.NDArray[np.float32]]:
    """One tensor under its Hugging Face name: `blk.7.attn_q.weight` is `model.layers.7.self_attn.q_proj.weight`."""
    values = np.array(values, dtype=np.float32)
    if name == "token_embd.weight":
        return "model.embed_tokens.weight", values
    if name == "output_norm.weight":
        return "model.norm.weight", values
    _, layer, part, _ = name.split(".")
    if part == "attn_q":
        values = _pair_to_halves(values, config.num_attention_heads)
    elif part == "attn_k":
        values = _pair_to_halves(values, config.num_key_value_heads)
    return f"model.layers.{layer}.{_NAMES[part]}.weight", values


def _pair_to_halves(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """GGUF keeps the two rows that one rotary angle turns side by side; transformers keeps them half a head apart.

    weight: [num_heads * head_dim, hidden]
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, hidden))


def _save_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    (folder / "chat_template.jinja").write_text(facts["tokenizer.chat_template"])
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    settings = {f"{ours}_token": tokens[facts[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in named.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": facts["llama.context_length"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
