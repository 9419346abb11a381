"""Constrained output: fields of OpenAI and vLLM that prescribe the form of an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.errors import invalid
from common.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from proxy.conversation.forced import closed
from proxy.server.errors import FIRST_ERROR

MAX_FIELDS = 64
"""Limit per object: pydantic would report a million errors for a million unknown fields."""


_Kind = Literal["json", "regex", "choice", "grammar", "json_object"]
_KINDS: Final[tuple[_Kind, ...]] = get_args(_Kind)


class FewFields(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"has {len(given)} fields, at most {MAX_FIELDS} are looked at")
        return given


class JsonSchemaFormat(BaseModel):
    """OpenAI's `json_schema`: name and schema. Every schema is enforced, as with `strict`."""

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(FewFields):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar("json_object")
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise invalid("response_format of type json_schema needs a schema", "response_format")
        return _grammar("json", self.json_schema.schema_, "response_format")


class StructuredOutputs(FewFields):
    """vLLM's `structured_outputs`, with exactly one field."""

    model_config = ConfigDict(extra="forbid")
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FIRST_ERROR] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(BaseModel):
    """Fields that constrain the output. At most a single field may be used.

    `guided_*` are older names of vLLM for the fields of `structured_outputs`.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], FIRST_ERROR] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None

    def constraint(self) -> Constraint | None:
        """Return the constraint of the output, if any.

        Raises TriptychError("invalid_request") naming a second or an impossible constraint.
        """
        found: list[Constraint] = []
        if self.response_format is not None and (whole := self.response_format.grammar()) is not None:
            found.append(Constraint("response_format", whole))
        if (new := self.structured_outputs) is not None:
            forms = _forms("structured_outputs.", (new.json_, new.regex, new.choice, new.grammar, new.json_object))
            if not forms:
                message = "structured_outputs needs one of json, regex, choice, grammar, json_object"
                raise invalid(message, "structured_outputs")
            found += forms
        old = self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, self.guided_json_object
        if any(value not in (None, False) for value in old):
            found += _forms("guided_", old)
        if len(found) > 1:
            message = f"{found[1].field} cannot be used together with {found[0].field}: the output has one form"
            raise invalid(message, found[1].field)
        return found[0] if found else None


@dataclass(frozen=True)
class Constraint:
    """Grammar, and the request's field of origin. Raises TriptychError("invalid_request") for one that is too long."""

    field: str
    grammar: Grammar

    def __post_init__(self) -> None:
        _check_size(self.field, self.grammar.text)


def _check_size(field: str, text: str) -> None:
    """Raise TriptychError("invalid_request") naming the field whose grammar or schema is too long."""
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(f"{field} has a grammar of {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed", field)


def _forms(prefix: str, values: tuple[Any, ...]) -> list[Constraint]:
    """Return the constraints among `values`, in the order of _KINDS; the names of their fields begin with `prefix`."""
    given = [(f"{prefix}{kind}", kind, value) for kind, value in zip(_KINDS, values, strict=True)]
    return [
        Constraint(field, _grammar(kind, value, field)) for field, kind, value in given if value not in (None, False)
    ]


def _grammar(kind: _Kind, value: Any, field: str) -> Grammar:
    if kind == "json_object":
        return Grammar(kind)
    if kind == "choice" and not value:
        raise invalid(f"{field} is empty: name at least one", field)
    text = value if isinstance(value, str) else json.dumps(value)
    _check_size(field, text)
    if kind != "json":
        return Grammar(kind, text)
    try:
        parsed = closed(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise invalid(f"{field} is not valid JSON: {error}", field) from error
    if not isinstance(parsed, dict | bool):
        raise invalid(f"{field} is no JSON schema: an object is, not {text[:80]!r}", field)
    return Grammar("json_schema", json.dumps(parsed))
