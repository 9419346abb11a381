"""The converted checkpoints are whole, load with transformers' Auto classes, and say sensible things."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import soundfile
import torch
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForCausalLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
)

from common.model_info import load_model_info
from common.text.processor import TextProcessor
from tests.weights import cache
from tests.weights.ctranslate2 import FormatError, read_ct2

DATA = Path(__file__).parents[1] / "data"
pytestmark = pytest.mark.weights


def test_smollm2_loads_completely_and_chats(smollm2: Path) -> None:
    model, loading = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])


def test_smollm2_text_processor_makes_the_prompt_that_transformers_makes(smollm2: Path) -> None:
    chat = [{"role": "user", "content": "Add 12 and 345, then say  'done'.\n"}]
    expected = AutoTokenizer.from_pretrained(smollm2).apply_chat_template(chat, add_generation_prompt=True)
    assert TextProcessor(load_model_info(str(smollm2))).render_chat(chat) == expected["input_ids"]


def test_whisper_loads_completely_and_transcribes_a_recording(whisper_tiny_en: Path) -> None:
    model, loading = AutoModelForSpeechSeq2Seq.from_pretrained(
        whisper_tiny_en, dtype=torch.float32, output_loading_info=True
    )
    assert not set(loading["missing_keys"]) - {"proj_out.weight"}
    assert not loading["unexpected_keys"]
    samples, rate = soundfile.read(DATA / "amiable.wav", dtype="float32")
    extractor = AutoFeatureExtractor.from_pretrained(whisper_tiny_en)
    features = extractor(samples, sampling_rate=rate, return_tensors="pt").input_features
    tokens = model.generate(features, do_sample=False, max_new_tokens=40)
    text = AutoTokenizer.from_pretrained(whisper_tiny_en).decode(tokens[0], skip_special_tokens=True)
    assert text.strip().lower().rstrip(".") == "he might even have been made amiable himself"


def test_whisper_vocabulary_is_complete(whisper_tiny_en: Path) -> None:
    config = AutoConfig.from_pretrained(whisper_tiny_en)
    tokenizer = TextProcessor(load_model_info(str(whisper_tiny_en))).tokenizer
    assert tokenizer.get_vocab_size(with_added_tokens=True) == config.vocab_size
    first, before = (tokenizer.token_to_id(token) for token in ("<|0.00|>", "<|notimestamps|>"))
    assert first is not None
    assert first - 1 == before
    assert tokenizer.token_to_id("<|30.00|>") == config.vocab_size - 1


def test_a_missing_package_is_named_together_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = cache.CHECKPOINTS["smollm2-135m"]._replace(package="no-such-package-anywhere")
    monkeypatch.setitem(cache.CHECKPOINTS, "absent", absent)
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    with pytest.raises(cache.PackageMissingError, match=r"no-such-package-anywhere .*requirements-weights\.txt"):
        cache.checkpoint("absent")


def test_a_truncated_model_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    name = b"weight\0"
    head = struct.pack("<IH", 6, 5) + b"Spec\0" + struct.pack("<IIH", 3, 1, len(name)) + name
    tensor = struct.pack("<BIBI", 1, 2, 0, 8) + struct.pack("<ff", 1.0, -2.0)
    path.write_bytes(head + tensor + struct.pack("<I", 0))
    assert read_ct2(path).tensors["weight"].tolist() == [1.0, -2.0]
    path.write_bytes((head + tensor)[:-3])
    with pytest.raises(FormatError, match="expected 8 more"):
        read_ct2(path)
