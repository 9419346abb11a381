"""Conversations become prompts as by transformers, with the model's own template, a given one, or a default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer, LlavaProcessor, PreTrainedTokenizerFast, Qwen2AudioProcessor

from common.errors import TriptychError
from common.model_info import load_model_info
from common.text.processor import TextProcessor
from tests.tiny import llava, qwen
from tests.tiny.text import make_qwen3

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


def text_of(folder: Path, chat_template: str | None = None) -> TextProcessor:
    return TextProcessor(load_model_info(str(folder)), chat_template)


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


@pytest.mark.parametrize("files", [["processor_config"], ["chat_template"], ["processor_config", "chat_template"]])
def test_a_template_in_a_processors_file_is_taken_as_by_transformers(tmp_path: Path, files: list[str]) -> None:
    """They go before the tokenizer's, which may be that of the text model alone."""
    folder = llava.make_llava(tmp_path / "model")
    (folder / "chat_template.json").unlink()
    (folder / "chat_template.jinja").write_text("of the tokenizer")
    for name in files:
        (folder / f"{name}.json").write_text(json.dumps({"chat_template": f"of {name}"}))
    theirs, _ = LlavaProcessor.get_processor_dict(folder)
    assert text_of(folder).chat_text(OPEN) == theirs["chat_template"]


OPEN = [{"role": "user", "content": "Colours?"}, {"role": "assistant", "content": "Red, green, "}]
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content FILTER }}<|end|>{% endfor %}"
PARTS = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}[end]{% endfor %}"
THINKING = (
    "{% if add_generation_prompt %}<answer>"
    "{% if enable_thinking is defined and not enable_thinking %}<skip>{% endif %}{% endif %}"
)


@pytest.mark.parametrize("template", [TURNS.replace("FILTER", how) for how in ("", "| trim", "| upper")] + [PARTS])
def test_a_last_message_is_continued_as_by_transformers(folder: Path, template: str) -> None:
    """Templates may trim the message, take only parts, or change the text so far that it cannot be continued."""
    text = text_of(folder, template)
    messages = (
        [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in OPEN] if template == PARTS else OPEN
    )
    if "upper" not in template:
        theirs = PreTrainedTokenizerFast(tokenizer_object=text.tokenizer)
        expected = theirs.apply_chat_template(
            messages, chat_template=template, continue_final_message=True, tokenize=False
        )
        assert (
            text.decode(text.render_chat(messages, continue_final_message=True), skip_special_tokens=False) == expected
        )
    assert text.render_chat(OPEN, continue_final_message=True) == text.render_chat(
        messages, continue_final_message=True
    )


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "<answer>"),
        ({"add_generation_prompt": False}, "<|end|>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<answer><skip>"),
        ({"chat_template_kwargs": {"enable_thinking": True, "unknown": [1]}}, "<answer>"),
    ],
    ids=str,
)
def test_a_template_gets_variables_of_the_request(folder: Path, options: dict[str, Any], end: str) -> None:
    text = text_of(folder, TURNS.replace("FILTER", "") + THINKING)
    assert text.decode(text.render_chat(OPEN, **options)).endswith(f"green, <|end|>{end.removeprefix('<|end|>')}")


def test_tools_and_documents_that_are_not_given_are_none_as_by_transformers(folder: Path) -> None:
    template = "{% for name in (tools, documents) %}{{ name is defined }}{{ name is none }}{% endfor %}"
    theirs = PreTrainedTokenizerFast(tokenizer_object=text_of(folder).tokenizer)
    expected = theirs.apply_chat_template(OPEN[:1], chat_template=template, tokenize=False)
    assert text_of(folder, template).chat_text(OPEN[:1]) == expected == "TrueTrue" * 2


@pytest.mark.parametrize("kept", ["list", "folder"])
def test_a_template_for_the_use_of_tools_is_taken_with_tools_as_by_transformers(tmp_path: Path, kept: str) -> None:
    folder = make_qwen3(tmp_path / "model")
    named = {
        "default": "\n[{{ messages[0].content }}]\n  ",
        "tool_use": "{% for t in tools %}{{ t.function.name }}{% endfor %}!\n",
    }
    if kept == "list":
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (folder / "chat_template.jinja").write_text(named["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    ours, theirs = text_of(folder), AutoTokenizer.from_pretrained(folder)
    for tools in (None, [{"type": "function", "function": {"name": "now"}}]):
        expected = theirs.apply_chat_template(OPEN[:1], tools=tools, tokenize=False)
        assert ours.chat_text(OPEN[:1], tools=tools) == expected == ("now!" if tools else "\n[Colours?]\n  ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"continue_final_message": True, "messages": OPEN[:1]}, "an assistant's text: the last message has none"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "cannot set add_generation_prompt"),
        ({"chat_template_kwargs": {"raise_exception": None}}, "cannot set raise_exception"),
        ({"chat_template_kwargs": {"number": 0}}, "the chat template refused the messages: division by zero"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(folder: Path, options: dict[str, Any], said: str) -> None:
    text = text_of(folder, TURNS.replace("FILTER", "") + "{% if number is defined %}{{ 1 / number }}{% endif %}")
    with pytest.raises(TriptychError, match=said) as error:
        text.render_chat(**{"messages": OPEN, **options})
    assert error.value.info.code == "invalid_request"


def test_a_given_template_goes_first_be_it_a_file_or_the_template_itself(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!")
    for given in (str(file), file.read_text()):
        assert text_of(folder, given).render_chat([{"role": "user", "content": "a"}]) == [ord("a"), ord("!")]
    file.write_text("{% if %}")
    for given, said in (
        (str(file), f"{file}: line 1"),
        ("{% if %}", "given: line 1"),
        ("none.jinja", "none.jinja: No such"),
    ):
        with pytest.raises(TriptychError, match=f"^cannot read the chat template {said}"):
            text_of(folder, given)
