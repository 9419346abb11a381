"""Streamed answers, put together as a client would."""

from __future__ import annotations

import json
from typing import Any


def events(response: Any) -> list[dict[str, Any]]:
    """The events of an HTTP response that is a stream, without the last one; lines end wherever Python says so."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1:] == ["[DONE]"], response.text[-2000:]
    return [json.loads(line) for line in lines[:-1]]


async def gather(stream: Any) -> tuple[dict[int, str], dict[int, str]]:
    """Texts and finish reasons by choice."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            if choice.finish_reason is not None:
                assert choice.index not in ends
                ends[choice.index] = choice.finish_reason
    return texts, ends
