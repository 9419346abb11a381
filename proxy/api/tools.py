"""Tools of a conversation: OpenAI's `tools` and `tool_choice`, calls in messages, and calls in answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from common.errors import invalid
from proxy.api.structured import Constraint
from proxy.conversation.dialect import Dialect
from proxy.conversation.forced import call_grammar
from proxy.conversation.parts import AnswerPart
from proxy.server.errors import FIRST_ERROR

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class FunctionDefinition(BaseModel):
    """A function that the model may call.

    Forced calls follow the schema. A rule that no grammar holds is left out; of a `strict` function it is refused.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def check(self, where: str) -> None:
        """Raise TriptychError("invalid_request") naming the tool, for a name or parameters that cannot be used."""
        if not _NAME.fullmatch(self.name):
            message = f"a tool is named {self.name!r:.80}: take 1 to 64 letters, digits, '_', '-' and '.'"
            raise invalid(message, f"{where}.name")
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":
            message = f"the parameters of the tool {self.name!r} have the type {kind!r:.40}: take 'object'"
            raise invalid(message, f"{where}.parameters")


class Tool(BaseModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    name: str


class NamedToolChoice(BaseModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], FIRST_ERROR] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolChoice(BaseModel):
    """Some of the tools, and the choice among them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_tag(value: Any) -> str:
    if isinstance(value, str):
        return "WORD"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "ALLOWED" if kind == "allowed_tools" else "NAMED"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("WORD")]
    | Annotated[NamedToolChoice, Tag("NAMED")]
    | Annotated[AllowedToolChoice, Tag("ALLOWED")],
    Discriminator(_choice_tag),
]


class CalledFunction(BaseModel):
    """`arguments` are JSON; some clients send the object itself."""

    name: str
    arguments: dict[str, Any] | str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return name and arguments, as an object where they are one: that is what templates take."""
        arguments: Any = self.arguments or {}
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ToolFields(BaseModel):
    """Fields of a request about tools. OpenAI's older `functions` and `function_call` are refused."""

    tools: Annotated[list[Tool], FIRST_ERROR] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_older_form(cls, given: Any) -> Any:
        for name in ("functions", "function_call"):
            if isinstance(given, dict) and given.get(name) not in (None, [], "none", "auto"):
                raise invalid(f"{name} is an older form that is not supported: send tools and tool_choice", name)
        return given

    def check_tools(self) -> None:
        """Raise TriptychError("invalid_request") naming the wrong field or tool.

        A choice of allowed tools becomes these tools alone, with the mode as the choice.
        """
        known: set[str] = set()
        for i, tool in enumerate(self.tools or ()):
            tool.function.check(f"tools[{i}].function")
            if tool.function.name in known:
                raise invalid(f"two tools are named {tool.function.name!r}", f"tools[{i}].function.name")
            known.add(tool.function.name)
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if not known:
            raise invalid("tool_choice asks for a call, which needs tools", "tool_choice")
        allowed = choice.allowed_tools.tools if isinstance(choice, AllowedToolChoice) else []
        names = [one.function.name for one in ([choice] if isinstance(choice, NamedToolChoice) else allowed)]
        for name in names:
            if name not in known:
                message = f"tool_choice names {name!r:.80}, which is none of the tools: {', '.join(sorted(known))}"
                raise invalid(message[:1000], "tool_choice")
        if isinstance(choice, AllowedToolChoice):
            self.tools = [tool for tool in self.tools or () if tool.function.name in names]
            self.tool_choice = choice.allowed_tools.mode

    @property
    def forced_name(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedToolChoice) else None

    @property
    def forces_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the model may call: none with the choice "none"."""
        return [] if self.tool_choice == "none" else (self.tools or [])

    @property
    def schemas(self) -> dict[str, dict[str, Any] | None]:
        return {tool.function.name: tool.function.parameters for tool in self.usable_tools}

    def call_constraint(self) -> Constraint | None:
        """Return the grammar of calls that must come, if any."""
        if not self.forces_call:
            return None
        name = self.forced_name
        index = next((i for i, tool in enumerate(self.usable_tools) if tool.function.name == name), None)
        field = "tools" if index is None else f"tools[{index}].function.parameters"
        strict = {tool.function.name for tool in self.usable_tools if tool.function.strict}
        grammar = call_grammar(self.schemas, name, single=self.parallel_tool_calls is False, strict=strict)
        return Constraint(field, grammar)


@dataclass
class CallDeltas:
    """Calls of an answer in OpenAI's form, whole or as they come."""

    dialect: Dialect
    count: int = field(default=0)

    def delta(self, part: AnswerPart) -> dict[str, Any]:
        """Return an entry of `tool_calls` of a stream: the head of a call, or further arguments of the last one."""
        if part.kind == "arguments":
            return {"index": self.count - 1, "function": {"arguments": part.text}}
        self.count += 1
        function = {"name": part.text, "arguments": ""}
        return {"index": self.count - 1, "id": self.dialect.new_call_id(), "type": "function", "function": function}

    def whole(self, parts: Iterable[AnswerPart]) -> list[dict[str, Any]]:
        """Return `tool_calls` of an answer."""
        calls: list[dict[str, Any]] = []
        for delta in map(self.delta, parts):
            if "id" in delta:
                calls.append({name: value for name, value in delta.items() if name != "index"})
            else:
                calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
        return calls


def joined_text(parts: Iterable[AnswerPart], kind: str) -> str:
    """Return the text of all parts of a kind."""
    return "".join(part.text for part in parts if part.kind == kind)
