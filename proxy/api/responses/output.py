"""Items of a response, and the events that tell of their growth, in OpenAI's order."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from proxy.conversation.dialect import Dialect
from proxy.conversation.parts import AnswerPart

Event = dict[str, Any]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass
class ResponseOutput:
    """Builds items of parts. At most the last item is open."""

    dialect: Dialect
    items: list[dict[str, Any]] = field(default_factory=list)
    _is_open: bool = False

    def add(self, part: AnswerPart) -> Iterator[Event]:
        """Take the next part, and yield its events."""
        kind = {"content": "message", "reasoning": "reasoning"}.get(part.kind, "function_call")
        if not self._is_open or part.kind == "call" or self.items[-1]["type"] != kind:
            yield from self.close()
            yield from self._begin(kind, part.text)
        if part.kind == "call":
            return
        item = self.items[-1]
        if kind == "function_call":
            item["arguments"] += part.text
            yield self._event("response.function_call_arguments.delta", delta=part.text)
            return
        item["content"][0]["text"] += part.text
        name = "output_text" if kind == "message" else "reasoning_text"
        extra: Event = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{name}.delta", content_index=0, delta=part.text, **extra)

    def _begin(self, kind: str, name: str) -> Iterator[Event]:
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"id": new_id("fc"), "call_id": self.dialect.new_call_id(), "name": name, "arguments": ""}
        elif kind == "message":
            item |= {"id": new_id("msg"), "role": "assistant", "content": []}
        else:
            item |= {"id": new_id("rs"), "summary": [], "content": []}
        self.items.append(item)
        self._is_open = True
        yield self._whole("response.output_item.added", item)
        if kind != "function_call":
            text: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(text)
            yield self._event("response.content_part.added", content_index=0, part={**text})

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, if any, and yield its events."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **named)
        else:
            text = item["content"][0]
            extra: Event = {"logprobs": []} if item["type"] == "message" else {}
            name = f"response.{text['type']}.done"
            yield self._event(name, content_index=0, text=text["text"], **extra)
            yield self._event("response.content_part.done", content_index=0, part={**text})
        yield self._whole("response.output_item.done", item)

    def end(self, status: str) -> Iterator[Event]:
        """End the answer. One without any item gets an empty message."""
        if not self.items:
            yield from self._begin("message", "")
        yield from self.close(status)

    def reasoning(self) -> str:
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")

    def _event(self, name: str, /, **fields: Any) -> Event:
        return {"type": name, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _whole(self, name: str, item: dict[str, Any]) -> Event:
        content = {"content": [{**part} for part in item["content"]]} if "content" in item else {}
        return {"type": name, "output_index": len(self.items) - 1, "item": {**item, **content}}
