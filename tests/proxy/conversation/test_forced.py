"""Schemas of clients, closed: what no list of properties allows cannot be written."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.conversation.forced import closed

A: dict[str, Any] = {"properties": {"a": {"type": "string"}}}
B: dict[str, Any] = {"properties": {"b": {"enum": [{"properties": {}}]}}}
END = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, END | A),
        ({"type": "object"}, {"type": "object"}),
        (A | {"additionalProperties": True}, A | {"additionalProperties": True}),
        ({"items": A, "$defs": {"b": B}}, {"items": END | A, "$defs": {"b": END | B}}),
        ({"anyOf": [A, B]}, {"anyOf": [END | A, END | B]}),
        (
            {"properties": {"examples": A, "properties": A}},
            END | {"properties": {"examples": END | A, "properties": END | A}},
        ),
        (True, True),
        ({"propertyNames": {"enum": ["a"]}}, {"propertyNames": {"enum": ["a"]}}),
    ],
)
def test_objects_have_the_properties_that_they_list(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


def test_that_names_are_text_is_no_rule() -> None:
    """zod says so of every record, and llguidance refuses `propertyNames`."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}
    allowed = {"type": "object", "additionalProperties": {"type": "number"}}
    assert closed({"items": record}) == {"items": allowed}
    assert closed({"properties": {"propertyNames": {"type": "string"}}})["properties"].keys() == {"propertyNames"}


@pytest.mark.parametrize("schema", [{"allOf": [A, B]}, A | {"anyOf": [B]}, {"if": A, "then": B}, A | {"$ref": "#/b"}])
def test_schemas_of_parts_of_an_object_stay_open(schema: Any) -> None:
    """Closed, each part would refuse the properties of the others."""
    assert closed(schema) == schema
