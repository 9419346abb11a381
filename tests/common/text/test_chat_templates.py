"""Folders without a chat template of their own are talked to as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import Qwen2AudioProcessor

from common.model_info import load_model_info
from common.text.processor import TextProcessor
from tests.tiny import qwen

CLIP, TEXT = {"type": "audio"}, {"type": "text", "text": "What's that?"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": [CLIP, TEXT]}],
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [TEXT, CLIP, CLIP]}],
    [
        {"role": "user", "content": [CLIP, TEXT]},
        {"role": "assistant", "content": "Glass."},
        {"role": "user", "content": [CLIP]},
    ],
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return qwen.make_qwen2_audio(tmp_path / "model")


def text_of(folder: Path) -> TextProcessor:
    return TextProcessor(load_model_info(str(folder)))


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("text_only", [False, True], ids=["no template", "a template of the text model"])
def test_qwen2_audio_is_prompted_as_by_transformers(
    folder: Path, conversation: list[dict[str, Any]], text_only: bool
) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    template = {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"} if text_only else {}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **template})
    )
    text = text_of(folder)
    theirs = Qwen2AudioProcessor.default_chat_template.fget(None)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = environment.from_string(theirs).render(messages=conversation, add_generation_prompt=True)
    token_ids = text.render_chat(conversation)
    assert text.decode(token_ids, skip_special_tokens=False) == expected
    clips = sum(part is CLIP for message in conversation for part in message["content"])
    assert len(text.placeholder_indices(token_ids, clips)) == clips


def test_a_template_of_its_own_goes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}<|AUDIO|>!{% endfor %}")
    assert text_of(folder).render_chat([{"role": "user", "content": [CLIP]}]) == [261, ord("!")]
