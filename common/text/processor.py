"""Text in and out of tokens: chat templates, prompts with media placeholders, incremental detokenising, stop strings.

Shared by `LLM` and the proxy, so that both make the same prompt of the same messages. Never imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from common.errors import TriptychError, invalid
from common.model_info import ModelInfo, read_json
from common.text.tasks import question_of

_PROBE = "a plain string"
_TAIL_TOKENS: Final = 8
"""How much of a prompt its continuation is decoded with: more than a character has, whatever the tokenizer."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Half a character of UTF-16, as JSON may escape it: no tokenizer takes that."""
_END_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands behind a message to be continued while the template is rendered, as in transformers."""
_CHARS_PER_TOKEN: Final = 64
"""More than the longest prompts have on the average; of blanks, some tokenizers make none however many there are."""
_PIECE_CHARS: Final = 2**16
"""How much of a text that may be too long is tokenised at once."""
_QWEN2_AUDIO: Final = """\
{%- set clips = namespace(count=0) -%}
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif -%}
    {{ '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string -%}
        {{ message.content }}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'audio' -%}
                {%- set clips.count = clips.count + 1 -%}
                {{ 'Audio ' ~ clips.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' }}
            {%- else -%}
                {{ part.text }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
_SMOLVLM_VIDEO: Final = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}{% if message.content is string %}"
    "{{ ': ' + message.content }}{% else %}{{ ':' if message.content[0].type == 'image' else ': ' }}"
    "{% for part in message.content %}{{ part.text if part.type == 'text' else '<' ~ part.type ~ '>' }}{% endfor %}"
    "{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Of transformers' processor, for conversations with videos, whatever the folder's own template is."""
_TEXTS_ALONE: Final = "{% for message in messages %}{{ message.content | join('', attribute='text') }}{% endfor %}"
_DEFAULT_TEMPLATES: Final = {"qwen2_audio": ("<|AUDIO|>", _QWEN2_AUDIO), "florence2": ("<image>", _TEXTS_ALONE)}
"""The placeholder and the template of a family, for folders without a template, or with one for text alone."""


class TextProcessor:
    """Tokenizer and chat template of a model. `chat_template`, a file or Jinja, takes the place of the model's own.

    Uses the `tokenizers` package directly: transformers would import torch, which the proxy does not have.
    Raises TriptychError: "model_not_found" where tokenizer.json is missing or damaged, or a chat template is damaged;
    "invalid_request" for a `chat_template` that is no readable file.
    """

    def __init__(self, info: ModelInfo, chat_template: str | None = None) -> None:
        self.info = info
        path = info.folder / "tokenizer.json"
        if not path.is_file():
            message = f"{info.folder} has no tokenizer.json: save the model's tokenizer with its fast class first"
            raise TriptychError("model_not_found", message, "model")
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package has no other kind
            raise TriptychError("model_not_found", f"cannot read {path}: {error}", "model") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.chat_template, self._template, self._specials = _load_chat_template(info, chat_template)
        self._writes_videos = info.family.frames_as_images and chat_template is None
        self._takes_parts_only = self._template is not None and not self._shows_plain_strings()
        encoder_tokens = info.max_encoder_tokens if info.media_kind == "text" else 0
        self._most_tokens = 2 * max(info.max_model_len, encoder_tokens)
        self.no_timestamps_token_id: int | None = None
        """Whisper's: timestamps follow it."""
        if info.family.name == "whisper":
            named = self.tokenizer.token_to_id("<|notimestamps|>")
            self.no_timestamps_token_id = info.generation.get("no_timestamps_token_id", named)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of any text. Other threads run meanwhile: the batch call of `tokenizers` releases the
        lock."""
        if self.info.family.placeholder_text is not None:
            text = text.replace(*self.info.family.placeholder_text)
        return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_prompt(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt that may be too long for the model's context.

        Raises TriptychError("context_length_exceeded") naming `param` where it has more than twice as many tokens as
        any prompt may have: each of them takes hundreds of bytes while a text is tokenised.
        """
        if len(text) > self._most_tokens and self._is_too_long(text):
            message = f"the context of {self._most_tokens // 2} tokens is too short for {len(text)} characters"
            raise TriptychError("context_length_exceeded", f"{message}; shorten the prompt", param)
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode_beside(self, text: str, param: str) -> list[int]:
        """Return the token ids of a text beside an image for an encoder that reads both, the placeholder first.

        Tasks become questions. Raises as `encode_prompt` and `question_of` do.
        """
        placeholder = self.info.placeholder_token_id or 0
        question = question_of(text.replace(self.tokenizer.id_to_token(placeholder) or "", ""), param)
        framed = f"{self._specials['bos_token']}{question}{self._specials['eos_token']}"
        return [placeholder, *self.encode_prompt(framed, param, add_special_tokens=False)]

    def _is_too_long(self, text: str) -> bool:
        if len(text) > _CHARS_PER_TOKEN * self._most_tokens:
            return True
        num_tokens = 0
        for begin in range(0, len(text), _PIECE_CHARS):
            num_tokens += len(self.encode(text[begin : begin + _PIECE_CHARS], add_special_tokens=False))
            if num_tokens > self._most_tokens:
                return True
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens. Timestamps of Whisper count as special, as in transformers."""
        if skip_special_tokens and self.no_timestamps_token_id is not None:
            token_ids = [token for token in token_ids if token < self.no_timestamps_token_id]
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. Arguments and errors are those of `chat_text`.

        Raises TriptychError("context_length_exceeded") as `encode_prompt` does.
        """
        return self.encode_chat(self.chat_text(messages, **options))

    def encode_chat(self, text: str) -> list[int]:
        """Return the token ids of a conversation rendered by `chat_text`. Raises as `encode_prompt` does."""
        if self.info.family.reads_text:
            return self.encode_beside(text, "messages")
        # Templates of text models write the first token themselves. Those of some models with media (LLaVA) leave it
        # to the tokenizer, as transformers' processors do unless it is there.
        begins = bool(self._specials["bos_token"]) and text.startswith(self._specials["bos_token"])
        special = self.info.media_kind is not None and not begins
        return self.encode_prompt(text, "messages", add_special_tokens=special)

    def chat_text(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text, ready for the assistant's turn.

        `messages` are {"role", "content"}; content is a string or parts {"type": "text", "text"}, {"type": "image"}
        {"type": "audio"} and {"type": "video"}. Each leaves one placeholder. `tools` are OpenAI's. With
        `continue_final_message` the prompt ends within the assistant's last message; otherwise the beginning of a turn
        is added, unless `add_generation_prompt` is False. `chat_template_kwargs` are further variables of the template.
        Raises TriptychError("invalid_request") where the model has no chat template, the template refuses or an option
        is impossible.
        """
        if self._template is None:
            raise invalid(f"{self.info.name} has no chat template: use /v1/completions", "messages")
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other: set one to false"
            raise invalid(message, "continue_final_message")
        variables = dict(chat_template_kwargs or {})
        reserved = {"messages", "tools", "add_generation_prompt", "continue_final_message", *self._specials}
        for name in sorted(variables.keys() & (reserved | self._template.environment.globals.keys())):
            message = f"chat_template_kwargs cannot set {name}: that is reserved"
            raise invalid(message, "chat_template_kwargs")
        if tools:
            variables["tools"] = tools
        variables["add_generation_prompt"] = not continue_final_message and add_generation_prompt is not False
        given = _with_end_mark(messages) if continue_final_message else messages
        try:
            text = self._render(given, variables)
        except Exception as error:  # templates raise of any kind, all the more with variables of a client
            raise invalid(f"the chat template refused the messages: {error!s:.1000}", "messages") from error
        if continue_final_message:
            text = _before_end_mark(text)
        return _SURROGATE.sub("\ufffd", text)

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        messages = [{**message, "content": self._as_taken(message["content"])} for message in messages]
        template = self._template
        assert template is not None
        if self._writes_videos and any(_shows_video(message) for message in messages):
            template = template.environment.from_string(_SMOLVLM_VIDEO)
        absent = {"tools": None, "documents": None}  # defined, as in transformers
        return str(template.render({**absent, **variables, **self._specials, "messages": messages}))

    def _as_taken(self, content: Any) -> Any:
        """Return the content of a message as the template takes it; a model of text alone gets the parts as one."""
        if isinstance(content, list) and self.info.media_kind is None:
            content = text_of(content)
        return [{"type": "text", "text": content}] if self._takes_parts_only and isinstance(content, str) else content

    def _shows_plain_strings(self) -> bool:
        """Return whether the template renders a message given as a string: some templates only loop over parts."""
        self._takes_parts_only = False
        try:
            return _PROBE in self._render([{"role": "user", "content": _PROBE}], {"add_generation_prompt": True})
        except Exception:  # of this conversation, for whatever reason: no sign of parts
            return True

    def placeholder_indices(self, token_ids: Sequence[int], num_inputs: int) -> list[int]:
        """Return the places of media items in a prompt.

        Raises TriptychError("invalid_request") where placeholders and items differ in number.
        """
        placeholders = self.info.placeholders
        indices = [i for i, token in enumerate(token_ids) if token in placeholders] if placeholders else []
        if len(indices) != num_inputs:
            message = f"the prompt has {len(indices)} media placeholders for {num_inputs} media items"
            raise invalid(message, "messages")
        return indices

    def write_videos(self, token_ids: list[int], texts: Sequence[str]) -> list[int]:
        """Return a prompt with a video's text, made by `common.media.videos.cut`, for each `<video>`.

        The image in such a text becomes the placeholder of videos. Raises TriptychError("invalid_request") where the
        prompt has another number of them.
        """
        if not (texts and self.info.family.frames_as_images):
            return token_ids
        image, video = self.info.placeholder_token_id or 0, self.info.placeholder_of("video") or 0
        shown = str(self.tokenizer.id_to_token(image))
        parts = re.split(f"({re.escape(shown)}|<video>)", self.decode(token_ids, skip_special_tokens=False))
        kinds, remaining = parts[1::2], iter(texts)
        if kinds.count("<video>") != len(texts):
            message = f"the prompt has {kinds.count('<video>')} times <video> for {len(texts)} videos"
            raise invalid(message, "messages")
        written = (next(remaining) if part == "<video>" else part for part in parts)
        ids, order = self.encode("".join(written), add_special_tokens=False), iter(kinds)
        return [video if token == image and next(order) == "<video>" else token for token in ids]

    def repeat_placeholders(self, token_ids: list[int], counts: Sequence[int]) -> list[int]:
        """Return a prompt with the placeholder of each media item as often as the item has pieces.

        Raises as `placeholder_indices` does.
        """
        if max(counts, default=1) == 1:
            return token_ids
        repeats = dict(zip(self.placeholder_indices(token_ids, len(counts)), counts, strict=True))
        return [token for index, token in enumerate(token_ids) for _ in range(repeats.get(index, 1))]


@dataclass
class Detokenizer:
    """Incremental text of a growing token sequence; holds back half characters and possible stop strings.

    Stop strings count after the first `min_tokens` tokens only.
    """

    text: TextProcessor
    stop: Sequence[str] = ()
    skip_special_tokens: bool = True
    min_tokens: int = 0
    includes_stop: bool = False
    """Whether the text ends with the stop string, rather than before it."""
    prompt: Sequence[int] = ()
    """Tokens whose text this one continues: SentencePiece's tokenizers leave out a blank at the start of a new text."""
    stopped: bool = False
    _ids: list[int] = field(default_factory=list)
    _begin: int = 0  # tokens of the prompt, less those dropped behind it
    _prefix: int = 0  # tokens before this are settled; those from here to _read give context to the next ones
    _read: int = 0
    _half: int = 0  # 1 where the text of the tokens read ends with a half character, which is held back
    _pending: str = ""  # decoded, but may be the start of a stop string

    def __post_init__(self) -> None:
        self._ids += self.prompt[-_TAIL_TOKENS:]
        self._begin = self._read = len(self._ids)

    @property
    def num_tokens(self) -> int:
        """Tokens so far: those behind a stop string are none of the text's."""
        return len(self._ids) - self._begin

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Add tokens, return the new text. After a stop string `stopped` is True and further calls return no text."""
        if len(token_ids) > 1:  # what ends a text or a character depends on the tokens so far: one by one
            *earlier, last = token_ids
            return "".join(self.push([token]) for token in earlier) + self.push([last], final=final)
        if self.stopped:
            return ""
        self._ids.extend(token_ids)
        before = self.text.decode(self._ids[self._prefix : self._read], skip_special_tokens=self.skip_special_tokens)
        now = self.text.decode(self._ids[self._prefix :], skip_special_tokens=self.skip_special_tokens)
        shown, unread = len(before) - self._half, len(self._ids) - self._read
        if self._half and not now.startswith(before[:shown]):  # bytes that were no text begin a character here
            shown = next(at for at, pair in enumerate(zip_longest(before[:shown], now)) if len({*pair}) > 1)
        if now == before and unread >= _TAIL_TOKENS and not final:  # special tokens, without any text
            self._begin -= unread
            del self._ids[self._read :]
        elif len(now) > shown and (final or unread >= _TAIL_TOKENS or not now.endswith("\ufffd")):
            self._prefix, self._read = self._read, len(self._ids)
            self._half = int(now.endswith("\ufffd") and not final)
            self._pending += now[shown : len(now) - self._half]
        stops = self.stop if self.num_tokens > self.min_tokens else ()
        found = [(at, at + len(stop)) for stop in stops if (at := self._pending.find(stop)) >= 0]
        if found:
            begin, end = min(found)
            self._pending, self.stopped = self._pending[: end if self.includes_stop else begin], True
        held = 0 if final or self.stopped else max((begun(self._pending, stop) for stop in stops), default=0)
        cut = len(self._pending) - held
        out, self._pending = self._pending[:cut], self._pending[cut:]
        return out


def begun(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`, without being the whole of it."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if marker.startswith(text[-size:])), 0)


class _GenerationBlock(Extension):
    """Support for `{% generation %}`: a mark for training, without effect on the text here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def text_of(content: Any) -> str:
    """Return the text of a message's content, its parts joined by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _shows_video(message: Mapping[str, Any]) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and any(part["type"] == "video" for part in parts)


def _with_end_mark(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a mark behind the text of the last one.

    Raises TriptychError("invalid_request") where that is not the assistant's, or has no text.
    """
    *before, last = messages
    content = last["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [dict(part) for part in content]
    text = next((part for part in reversed(parts) if part["type"] == "text"), None)
    if last["role"] != "assistant" or text is None:
        message = "continue_final_message continues an assistant's text: the last message has none"
        raise invalid(message, "continue_final_message")
    text["text"] += _END_MARK
    return [*before, {**last, "content": text["text"] if isinstance(content, str) else parts}]


def _before_end_mark(rendered: str) -> str:
    """Return a rendered conversation up to the mark, without the blanks that the template took from the mark's end."""
    before, mark, after = rendered.rpartition(_END_MARK.rstrip())
    if not mark:
        message = "the chat template leaves out the end of the last message, which cannot be continued"
        raise invalid(message, "continue_final_message")
    return before if after.startswith(" ") else before.rstrip()


def _template_source(info: ModelInfo, config: Mapping[str, Any]) -> str | None:
    """Return the model's own chat template; of several named ones the default, and with tools the one for their use.

    `config` is the tokenizer's.
    """
    template_path = info.folder / "chat_template.jinja"
    tool_use_path = info.folder / "additional_chat_templates" / "tool_use.jinja"
    # Models with media used to keep it beside the tokenizer's, where transformers' processors look first.
    names = ("processor_config", "chat_template")
    older = (read_json(info.folder / f"{name}.json").get("chat_template") for name in names if info.media_kind)
    source = next(filter(None, older), None)
    if source is None:
        source = template_path.read_text() if template_path.is_file() else config.get("chat_template")
    named = {one["name"]: one["template"] for one in source} if isinstance(source, list) else {"default": source}
    source, tool_use = named.get("default"), named.get("tool_use")
    if tool_use_path.is_file():
        tool_use = tool_use_path.read_text()
    if source and tool_use:
        tool_use, source = (text.removesuffix("\n") for text in (tool_use, source))  # as Jinja does at the end of each
        source = f"{{% if tools %}}\n{tool_use}{{%+ else %}}\n{source}{{%+ endif %}}"
    placeholder, default = _DEFAULT_TEMPLATES.get(info.family.name, ("", None))
    return default if default is not None and placeholder not in (source or "") else source


def _read_template(given: str) -> str:
    """Return a chat template given as a file or as itself.

    Raises TriptychError("invalid_request") for a name of no readable file.
    """
    try:
        return Path(given).read_text()
    except (OSError, ValueError) as error:
        if "{" in given or "\n" in given:  # no name of a file
            return given
        reason = getattr(error, "strerror", None) or error
        raise invalid(f"cannot read the chat template {given}: {reason}", "chat_template") from error


def _load_chat_template(info: ModelInfo, given: str | None) -> tuple[str | None, Any, dict[str, str]]:
    """Return the chat template and its compiled form, None if missing, and the special tokens used by templates."""
    config = read_json(info.folder / "tokenizer_config.json")
    source = _template_source(info, config) if given is None else _read_template(given)
    specials = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        specials[name] = value["content"] if isinstance(value, dict) else (value or "")
    if source is None:
        return None, None, specials
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.filters["tojson"] = _to_json
    try:
        return source, environment.from_string(source), specials
    except TemplateSyntaxError as error:
        whose = f"of {info.folder}" if given is None else given if given != source else "given"
        message = f"cannot read the chat template {whose}: line {error.lineno}: {error.message}"
        raise TriptychError("model_not_found", message, "model") from error


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write a value as transformers' filter does, which takes the options of `json.dumps`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_template_error(message: str) -> NoReturn:
    raise TemplateError(message)
