"""Chat templates as published models have them: of parts only, with training marks, in one of three files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from common.model_info import load_model_info
from common.text import TextProcessor
from tests.tiny.llava import make_idefics3, make_llava
from tests.tiny_models import make_llama, make_qwen2_5_vl

MAKERS = {"llama": make_llama, "qwen2_5_vl": make_qwen2_5_vl, "llava": make_llava, "idefics3": make_idefics3}
HELLO = {"role": "user", "content": "hello"}
HELLO_IN_PARTS = {"role": "user", "content": [{"type": "text", "text": "hello"}]}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("models")
    return lambda name: base / name if (base / name).exists() else MAKERS[name](base / name)


def rendered(folder: Path, *messages: dict[str, Any]) -> str:
    text = TextProcessor(load_model_info(str(folder)))
    return text.decode(text.render_chat(list(messages)), skip_special_tokens=False)


@pytest.mark.parametrize("name", MAKERS)
def test_a_string_and_its_one_part_render_the_same(name: str, folder_of: Callable[[str], Path]) -> None:
    assert "hello" in rendered(folder_of(name), HELLO)
    assert rendered(folder_of(name), HELLO) == rendered(folder_of(name), HELLO_IN_PARTS)


def test_marks_of_the_assistants_words_are_no_words(folder_of: Callable[[str], Path]) -> None:
    answer = {"role": "assistant", "content": "hi"}
    assert rendered(folder_of("llava"), HELLO, answer) == "USER: hello ASSISTANT: hi ASSISTANT:"


def test_the_template_file_goes_before_the_processors_and_that_before_the_tokenizers(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "three"
    shutil.copytree(folder_of("llava"), folder)
    (folder / "chat_template.json").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "tokenizer's"}))
    assert rendered(folder, HELLO) == "tokenizer's"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor's"}))
    assert rendered(folder, HELLO) == "processor's"
    (folder / "chat_template.jinja").write_text("file's")
    assert rendered(folder, HELLO) == "file's"


@pytest.mark.parametrize(
    ("name", "template", "starts"),
    [
        ("llava", "{{ messages[0].content }}", 1),
        ("llava", "{{ bos_token }}{{ messages[0].content }}", 1),
        ("llama", "{{ messages[0].content }}", 0),
    ],
    ids=["left to the tokenizer", "in the template", "text models have it in the template"],
)
def test_a_prompt_begins_with_one_start_token(
    name: str, template: str, starts: int, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "starting"
    shutil.copytree(folder_of(name), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|im_start|>"}))
    (folder / "chat_template.jinja").write_text(template)
    token_ids = TextProcessor(load_model_info(str(folder))).render_chat([HELLO])
    assert token_ids[:starts] == [start] * starts
    assert token_ids.count(start) == starts
