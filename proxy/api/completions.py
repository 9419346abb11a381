"""POST /v1/completions: text from text or token ids, several prompts at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from common.messages import TokenLogprob
from proxy.api.choices import Choice, best
from proxy.api.logprobs import CompletionLogprobs, LogprobShapes, joined
from proxy.api.merge import merge
from proxy.api.openai_types import CompletionRequest, Prompt, parse
from proxy.api.prompts import check_number, make_jobs
from proxy.dispatch.text_stream import Delta, TextStream, Usage
from proxy.server.request_context import Json, Payload, RequestContext, Sse
from proxy.service import LineName, Service


async def completions(service: Service, exchange: RequestContext) -> AsyncGenerator[Payload]:
    """`n` choices per prompt, whole or as one stream of all of them."""
    line: LineName = "media" if service.info.is_encoder_decoder else "text"
    service.check_line(line)
    body = await parse(CompletionRequest, exchange)
    service.check_model(body.model)
    prompts = body.prompts
    check_number(body)
    places = service.join_line(exchange, line, len(prompts))
    jobs = await make_jobs(service, exchange, body)
    shapes = service.shapes(body)
    answers = [
        _Answer(body, shapes, service.generation(job, exchange, places.take(), body), _echo(service, body, prompt))
        for job, prompt in zip(jobs, prompts, strict=True)
    ]
    head = _head(service, exchange)
    merged = merge([service.deltas(answer.generation, exchange) for answer in answers])
    async with aclosing(merged):
        if body.stream:
            async for event in _stream(head, body, answers, merged):
                yield event
        else:
            yield await _collect(head, body, answers, merged)


@dataclass
class _Answer:
    """The choices of one prompt. `echo` is the prompt's text where it is part of the answer."""

    body: CompletionRequest
    shapes: LogprobShapes
    generation: TextStream
    echo: str
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)

    @property
    def usage(self) -> Usage:
        return replace(self.generation.usage, completion_tokens=0) if self._only_echo else self.generation.usage

    @property
    def _only_echo(self) -> bool:
        return self.body.max_tokens == 0

    def told(self, delta: Delta) -> Delta:
        """What the client is told of a delta: nothing but its end where only the prompt was asked for."""
        if not self._only_echo:
            return delta
        return Delta("", None if delta.finish_reason is None else "length", index=delta.index)

    def logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The next log-probabilities of a choice; the prompt's come first if it is echoed."""
        if self.body.logprobs is None:
            return None
        first = index not in self._logprobs
        pieces = self._logprobs.setdefault(index, CompletionLogprobs(self.shapes))
        if not (first and self.body.echo):
            return pieces.add(entries)
        prompt, known = self.generation.job.prompt_token_ids, self.generation.prompt_logprobs
        known = known if len(known) == len(prompt) else [None] * len(prompt)
        return joined([pieces.add_prompt(prompt, known), pieces.add(entries)])

    def begins(self, index: int) -> bool:
        """Whether nothing of a choice has been told yet."""
        begun = index in self._begun
        self._begun.add(index)
        return not begun

    def prompt_logprobs(self) -> dict[str, Any]:
        if self.body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": self.shapes.prompt(self.generation.prompt_logprobs)}


async def _collect(
    head: dict[str, Any],
    body: CompletionRequest,
    answers: list[_Answer],
    merged: AsyncGenerator[tuple[int, Delta]],
) -> Json:
    width = body.width if body.picks_best else body.num_choices
    found = [[Choice() for _ in range(width)] for _ in answers]
    async for number, delta in merged:
        found[number][delta.index].add(answers[number].told(delta))
    choices = []
    for number, answer in enumerate(answers):
        for rank, one in enumerate(best(found[number], body.num_choices)):
            choice = _choice(
                number * body.num_choices + rank,
                answer.echo + one.text,
                one.finish_reason,
                answer.logprobs(rank, one.logprobs),
            )
            score = {"score": one.score} if body.use_beam_search else {}
            choices.append({**choice, **answer.prompt_logprobs(), **body.told(one.token_ids), **score})
    return Json({**head, "choices": choices, "usage": _usage(answers).to_json()})


async def _stream(
    head: dict[str, Any],
    body: CompletionRequest,
    answers: list[_Answer],
    merged: AsyncGenerator[tuple[int, Delta]],
) -> AsyncGenerator[Payload]:
    num_told = 0  # of the tokens: those of several prompts are counted ahead of what is told
    async for number, whole in merged:
        answer, delta = answers[number], answers[number].told(whole)
        echo = answer.echo if answer.begins(delta.index) else ""
        logprobs = answer.logprobs(delta.index, delta.logprobs)
        index = number * body.num_choices + delta.index
        choice = {**_choice(index, echo + delta.text, delta.finish_reason, logprobs), **body.told(delta.token_ids)}
        num_told += len(delta.token_ids)
        usage = body.chunk_usage(replace(_usage(answers), completion_tokens=num_told))
        yield Sse({**head, "choices": [choice], **usage})
    if body.wants_usage_event:
        yield Sse({**head, "choices": [], "usage": _usage(answers).to_json()})
    yield Sse(None)


def _choice(index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _usage(answers: list[_Answer]) -> Usage:
    total = Usage()
    for answer in answers:
        total.add(answer.usage)
    return total


def _echo(service: Service, body: CompletionRequest, prompt: Prompt) -> str:
    if not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else service.text.decode(prompt, skip_special_tokens=False)


def _head(service: Service, exchange: RequestContext) -> dict[str, Any]:
    return {
        "id": exchange.id,
        "object": "text_completion",
        "created": int(exchange.created_s),
        "model": service.model_name,
    }
