"""A request for a response, and its conversion to the request of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import TriptychError, invalid
from proxy.api.openai_types import MAX_MESSAGES, ChatRequest
from proxy.server.errors import FIRST_ERROR, from_validation, refuse_unsupported

PASSED_ON: Final = frozenset(
    (
        *("top_k", "min_p", "seed", "stop", "stop_token_ids", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "chat_template_kwargs", "priority", "logit_bias", "ignore_eos", "min_tokens"),
    )
)
"""Fields of chats that hold here, too."""
IGNORED: Final = frozenset(
    (
        *("metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "max_tool_calls", "stream_options"),
    )
)
"""Fields without influence on the answer; `max_tool_calls` counts OpenAI's own tools."""
OFF: Final[dict[str, tuple[Any, ...]]] = {
    "background": (None, False),
    "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),
    "conversation": (None,),
    "prompt": (None,),
}
"""Unsupported fields, and the values accepted as "off"."""
_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class TextFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(BaseModel):
    """`format` is what `response_format` is in chats; `verbosity` is accepted."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(BaseModel):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(BaseModel):
    """POST /v1/responses. `input` is text or a list of items."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    input: Annotated[list[dict[str, Any]], FIRST_ERROR] | str = Field(max_length=2**28)
    instructions: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None
    tool_choice: dict[str, Any] | str | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> ResponsesRequest:
        refuse_unsupported(self.model_extra, PASSED_ON | IGNORED, OFF, PASSED_ON | type(self).model_fields.keys())
        for name, value in {**(self.model_extra or {}), "tools": self.tools, "tool_choice": self.tool_choice}.items():
            try:
                json.dumps(value, allow_nan=False)  # as the answer repeats it
            except ValueError as error:
                raise invalid(f"{name} has a number that JSON has not: NaN, or beyond 1.8e308", name) from error
        if "message.output_text.logprobs" in (self.include or ()):
            raise invalid("include cannot have message.output_text.logprobs: use /v1/chat/completions", "include")
        return self

    def to_chat(self, before: Sequence[dict[str, Any]]) -> tuple[ChatRequest, list[dict[str, Any]]]:
        """Return the request of a chat, and its messages without the instructions. `before` are earlier messages.

        Raises TriptychError("invalid_request") naming the wrong field.
        """
        messages = [*before, *messages_of(self.input)]
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        chat: dict[str, Any] = {name: value for name, value in (self.model_extra or {}).items() if name in PASSED_ON}
        chat |= {name: getattr(self, name) for name in ("model", "stream", "temperature", "top_p")}
        chat |= {
            "messages": [*system, *messages],
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())],
            "tool_choice": _choice(self.tool_choice),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        form = None if self.text is None else self.text.format
        if form is not None and form.type != "text":
            schema = {"name": form.name, "schema": form.schema_}
            chat["response_format"] = {"type": form.type, "json_schema": schema}
        try:
            return ChatRequest.model_validate(chat), messages
        except ValidationError as error:
            raise renamed(from_validation(error)) from error
        except TriptychError as error:
            raise renamed(error) from None


def renamed(error: TriptychError) -> TriptychError:
    """Return an error about a chat with this endpoint's name of the field; an error about no field unchanged."""
    param = error.info.param
    if param is None:
        return error
    names = {"response_format": "text.format", "max_completion_tokens": "max_output_tokens"}
    names |= {"reasoning_effort": "reasoning.effort"}
    new = "input" if param.startswith("messages") else names.get(param, param.replace(".function.", "."))
    message = error.info.message.replace(param, new).replace("tool_call_id", "call_id")
    return TriptychError(error.info.code, message, new)


def messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat for an input. Reasoning, text and calls of one turn become one message.

    Raises TriptychError("invalid_request") naming the item.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise invalid(f"input takes 1 to {MAX_MESSAGES} items, not {len(given)}", "input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        message = _message(item, f"input[{i}]")
        last = messages[-1] if messages else {}
        if message["role"] == last.get("role") == "assistant" and not (message["content"] and last["content"]):
            last["content"] = last["content"] or message["content"]
            for name in ("tool_calls", "reasoning_content"):
                if name in message:
                    last[name] = last[name] + message[name] if name in last else message[name]
        else:
            messages.append(message)
    return messages


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = _content(item.get("output"), f"{where}.output")
        return {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = _content(parts, f"{where}.content")
        texts = [part["text"] for part in text if part["type"] == "text"] if isinstance(text, list) else []
        return {"role": "assistant", "content": None, "reasoning_content": "\n".join(texts)}
    if kind == "item_reference":
        message = f"{where}: no item is found by its id here: send it whole, as the AI SDK does with `store: false`"
        raise invalid(message, where)
    message = f"{where}: the type {kind!r:.60} is not supported: take message, function_call, function_call_output"
    raise invalid(f"{message} or reasoning", where)


def _content(given: Any, where: str) -> Any:
    """Return the content of a chat's message."""
    if not isinstance(given, list):
        return given
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(given)]


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "text", "text": str(part.get("refusal", ""))}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail")}}
    if kind == "input_audio" and "input_audio" in part:
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    takes = "input_text with text, input_image with image_url, or input_audio"
    raise invalid(f"{where}: the part {part!r:.80} is not supported: take {takes}", where)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise invalid(f"{where}: tools are functions here, not {kind!r:.60}", where)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(given: Any) -> Any:
    """Return the tool choice of a chat."""
    if not isinstance(given, dict):
        return given
    if given.get("type") != "allowed_tools":
        return {"type": given.get("type"), "function": {"name": given.get("name")}}
    tools = given.get("tools")
    allowed = {"mode": given.get("mode"), "tools": list(map(_choice, tools)) if isinstance(tools, list) else tools}
    return {"type": "allowed_tools", "allowed_tools": allowed}
