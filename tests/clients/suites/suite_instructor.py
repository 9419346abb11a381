"""instructor: its default, which is a tool, and its other modes."""

from __future__ import annotations

import os
from typing import Any, Literal

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel


class Sign(BaseModel):
    colour: Literal["red", "green", "blue", "yellow", "orange", "purple", "white", "black"]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_typed_answers(mode: str) -> None:
    client = OpenAI(base_url=os.environ["SIGNS_URL"] + "/v1", api_key="none")
    asked: Any = [{"role": "user", "content": "What colour is the sign?"}]
    answer = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create(
        model="signpost", messages=asked, response_model=Sign, max_retries=0
    )
    assert isinstance(answer, Sign)
