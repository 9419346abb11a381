"""Answers of /v1/responses, whole or as typed events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse

from common.errors import TriptychError
from proxy.api.chat import ChatAnswer, begin_answer
from proxy.api.openai_types import parse
from proxy.api.responses.output import Event, ResponseOutput
from proxy.api.responses.request import ResponsesRequest, messages_of, renamed
from proxy.dispatch.text_stream import Delta, Usage
from proxy.server.request_context import Payload, RequestContext, Sse
from proxy.service import Service


async def responses(service: Service, context: RequestContext) -> AsyncGenerator[Payload]:
    """Answer one request by the path of chats."""
    service.check_lines(*service.chat_lines)
    body = await parse(ResponsesRequest, context)
    service.check_model(body.model)
    earlier = [] if body.previous_response_id is None else service.responses.messages(body.previous_response_id)
    chat, messages = body.to_chat(earlier)
    try:
        answer = await begin_answer(service, context, chat)
    except TriptychError as error:
        raise renamed(error) from None
    response = _Response(service, body, answer, ResponseOutput(service.dialect))
    async with aclosing(answer.source.deltas()) as deltas:
        try:
            async for delta in deltas:
                for event in response.events(delta):
                    if body.stream:
                        yield response.sse(event)
        except TriptychError as error:
            known = renamed(error)
            if response.num_events:
                response.error = {"code": "server_error", "message": known.info.message}
                yield response.sse({"type": "response.failed", "response": response.value()})
            raise known from None
    value = response.value()
    if response.is_kept:
        service.responses.put(value, messages + messages_of(response.output.items))
    if body.stream:
        yield response.sse({"type": f"response.{value['status']}", "response": value})
        yield Sse(None)
    else:
        yield JSONResponse(value)


@dataclass
class _Response:
    """A response under way."""

    service: Service
    body: ResponsesRequest
    answer: ChatAnswer
    output: ResponseOutput
    finish: str | None = None
    error: dict[str, Any] | None = None
    num_events: int = 0

    def sse(self, event: Event) -> Sse:
        self.num_events += 1
        return Sse({**event, "sequence_number": self.num_events - 1}, event["type"])

    def events(self, delta: Delta) -> Iterator[Event]:
        """Add a delta to the output, and yield its events; those of a stream begin with the response's own."""
        for name in ("created", "in_progress") if self.body.stream and not self.num_events else ():
            yield {"type": f"response.{name}", "response": self.value()}
        for part in self.answer.parts(0, delta.text, final=delta.finish_reason is not None):
            yield from self.output.add(part)
        if delta.finish_reason is not None:
            self.finish = delta.finish_reason
            yield from self.output.end(self.status)

    @property
    def is_kept(self) -> bool:
        """Whether later requests may refer to the response, once it is whole."""
        return self.body.store is not False and bool(self.service.responses.limit_bytes)

    @property
    def status(self) -> str:
        if self.error is not None:
            return "failed"
        return {None: "in_progress", "length": "incomplete"}.get(self.finish, "completed")

    def value(self) -> dict[str, Any]:
        """Return the response, with all fields that the Open Responses specification wants."""
        body, extra, status = self.body, self.body.model_extra or {}, self.status
        form = None if body.text is None else body.text.format
        reasoning = body.reasoning
        return {
            "id": self.answer.head["id"],
            "object": "response",
            "created_at": self.answer.head["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": extra.get("max_tool_calls"),
            "model": self.answer.head["model"],
            "output": list(self.output.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "store": self.is_kept,
            **self._sampling(),
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in body.tools or ()],
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
            "metadata": extra.get("metadata") or {},
            "safety_identifier": extra.get("safety_identifier"),
            "prompt_cache_key": extra.get("prompt_cache_key"),
            "user": extra.get("user"),
            "usage": None if status == "in_progress" else self._usage(self.answer.source.usage),
        }

    def _sampling(self) -> dict[str, Any]:
        """Return the sampling in effect."""
        names = "temperature", "top_p", "presence_penalty", "frequency_penalty"
        sampling = self.answer.source.job.sampling
        return {**{name: getattr(sampling, name) for name in names}, "top_logprobs": 0}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Return the counts of tokens. Those of reasoning are counted by its text."""
        reasoning = self.output.reasoning()
        num_reasoning = len(self.service.text.encode(reasoning, add_special_tokens=False)) if reasoning else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
