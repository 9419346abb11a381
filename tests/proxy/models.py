"""Model folders as far as a proxy looks at them: JSON files and a tokenizer, no weights, and no torch to make them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from common.model_info import BUNDLED

_SOURCE = BUNDLED / "signpost"
_SPEECH_TOKENS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|fr|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|notimestamps|>",
)


def make_text_model(folder: Path, context: int = 128) -> Path:
    """A Llama with a chat template and a context of so many tokens."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_bytes((_SOURCE / name).read_bytes())
    config = json.loads((_SOURCE / "config.json").read_text())
    llama = {**config["text_config"], "architectures": ["LlamaForCausalLM"], "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(llama))
    return folder


def make_speech_model(folder: Path) -> Path:
    """A multilingual Whisper with three languages and room for 96 tokens."""
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(_SOURCE / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPEECH_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in _SPEECH_TOKENS}
    generation = {
        "is_multilingual": True,
        "lang_to_id": {token: ids[token] for token in ("<|en|>", "<|de|>", "<|fr|>")},
        "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "begin_suppress_tokens": [5, ids["<|endoftext|>"]],
        "suppress_tokens": [1, 2],
    }
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "max_source_positions": 1500,
        "max_target_positions": 96,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "preprocessor_config.json").write_text(json.dumps({"chunk_length": 30}))
    return folder


def make_translation_model(folder: Path) -> Path:
    """A BART: an encoder of text, a decoder that begins with </s><s>, and rules of its own for generation."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((_SOURCE / name).read_bytes())
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = {
        "architectures": ["BartForConditionalGeneration"],
        "max_position_embeddings": 64,
        "vocab_size": vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
    generation = {**config, "no_repeat_ngram_size": 3, "forced_eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def make_listening_model(folder: Path) -> Path:
    """A Qwen2-Audio: clips stand in the conversation, one <|AUDIO|> each."""
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(_SOURCE / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|AUDIO|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if 'audio' in part or part['type'] == 'audio' %}<|AUDIO|>"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    text = {"max_position_embeddings": 256, "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 1}
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "audio_token_index": tokenizer.token_to_id("<|AUDIO|>"),
        "text_config": text,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
