"""instructor: its default, which is a tool, and its other modes."""

from __future__ import annotations

from typing import Any

import instructor
import pytest
from openai import OpenAI
from signs import QUESTION, URL, Sign


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_typed_answers(mode: str) -> None:
    client = OpenAI(base_url=URL, api_key="none")
    asked: Any = [{"role": "user", "content": QUESTION}]
    answer = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create(
        model="signpost", messages=asked, response_model=Sign, max_retries=0
    )
    assert isinstance(answer, Sign)
