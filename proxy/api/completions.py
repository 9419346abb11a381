"""POST /v1/completions: text from text or token ids, several prompts at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi.responses import Response

from common.messages import TokenLogprob
from proxy.api.logprobs import CompletionLogprobs, LogprobShapes
from proxy.api.merge import merge_streams
from proxy.api.openai_types import CompletionRequest, parse
from proxy.api.prompts import check_number, decoder_prompts, make_jobs, processed_prompts
from proxy.dispatch.jobs import Job
from proxy.dispatch.text_stream import Choice, Delta, TextStream, Usage, best
from proxy.server.request_context import Payload, RequestContext, Sse, json_answer
from proxy.service import LineName, Service

Begins = list[tuple[str, dict[str, Any]]]
"""Per prompt: the text before each answer, and further fields of the first choice."""


async def completions(service: Service, context: RequestContext) -> AsyncGenerator[Payload]:
    """Answer with `n` choices per prompt, whole or as a stream."""
    line: LineName = "media" if service.info.is_encoder_decoder else "text"
    service.check_lines(line)
    body = await parse(CompletionRequest, context)
    service.check_model(body.model)
    check_number(body)
    tickets = service.join_line(context, line, len(body.prompts))
    jobs = await make_jobs(service, context, body)
    begins: Begins = [("", {})] * len(jobs)
    if body.echo or body.return_prompts:
        begins = await asyncio.to_thread(_begins, service, body, jobs)
    shapes = LogprobShapes(service.token_texts, body.num_logprobs or 0, bool(body.return_tokens_as_token_ids))
    how = {**body.text_options(), "continues_prompt": True}
    texts = [service.generate(job, context, tickets.acquire(), **how) for job in jobs]
    answers = [_CompletionAnswer(body, shapes, text, *begin) for text, begin in zip(texts, begins, strict=True)]
    head = {
        "id": context.id,
        "object": "text_completion",
        "created": int(context.created_s),
        "model": body.model or service.model_name,
    }
    async with aclosing(merge_streams([text.deltas() for text in texts])) as deltas:
        if not body.stream:
            found = [[Choice() for _ in range(answer.stream.job.sampling.n)] for answer in answers]
            async for number, delta in deltas:
                found[number][delta.index].add(answers[number].for_client(delta))
            yield await asyncio.to_thread(_whole, head, body, answers, found)
            return
        slow = body.echo and body.logprobs is not None  # the prompt's log-probabilities are many
        num_emitted = 0  # tokens: those of several prompts are counted ahead of their emission
        async for number, delta in deltas:
            answer, delta = answers[number], answers[number].for_client(delta)
            part = number, delta.index, delta
            hops = slow and delta.index not in answer.begun
            choice = await asyncio.to_thread(answer.choice, *part) if hops else answer.choice(*part)
            choice |= body.token_ids_of(delta.token_ids)
            num_emitted += len(delta.token_ids)
            usage = body.chunk_usage(replace(_usage(answers), completion_tokens=num_emitted))
            yield Sse({**head, "choices": [choice], **usage})
    if body.wants_usage_event:
        yield Sse({**head, "choices": [], "usage": _usage(answers).to_json()})
    yield Sse(None)


@dataclass
class _CompletionAnswer:
    """The choices of a prompt. `echo` is the text before each, `prompts` are further fields of the first."""

    body: CompletionRequest
    shapes: LogprobShapes
    stream: TextStream
    echo: str
    prompts: dict[str, Any]
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)

    @property
    def usage(self) -> Usage:
        return replace(self.stream.usage, completion_tokens=0) if self.body.max_tokens == 0 else self.stream.usage

    def for_client(self, delta: Delta) -> Delta:
        """Return the delta for the client: only the end where the client asked for the prompt alone."""
        if self.body.max_tokens != 0:
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
        prompt, known = self.stream.job.prompt_token_ids, self.stream.prompt_logprobs
        known = known if len(known) == len(prompt) else [None] * len(prompt)
        before, own = pieces.add_prompt(prompt, known, self.echo), pieces.add(entries)
        return {name: [*before[name], *own[name]] for name in before}

    def choice(self, number: int, index: int, part: Delta | Choice) -> dict[str, Any]:
        """Return a choice, or the next part of one, as JSON. `number` is the prompt's, `index` the sequence's."""
        begins = index not in self.begun
        self.begun.add(index)
        return {
            "index": number * self.body.num_choices + index,
            "text": (self.echo if begins else "") + part.text,
            "logprobs": self.logprobs(index, part.logprobs),
            "finish_reason": part.finish_reason,
            **({"score": part.score} if self.body.use_beam_search else {}),
            **(self.prompts if begins and index == 0 else {}),
        }


def _whole(
    head: dict[str, Any], body: CompletionRequest, answers: list[_CompletionAnswer], found: list[list[Choice]]
) -> Response:
    """Return the complete answer, as `ChatAnswer.whole` does."""
    choices = []
    for number, answer in enumerate(answers):
        for rank, one in enumerate(best(found[number], body.num_choices)):
            choice = answer.choice(number, rank, one)
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = answer.shapes.prompt(answer.stream.prompt_logprobs)
            choices.append({**choice, **body.token_ids_of(one.token_ids)})
    return json_answer({**head, "choices": choices, "usage": _usage(answers).to_json()})


def _usage(answers: list[_CompletionAnswer]) -> Usage:
    total = Usage()
    for answer in answers:
        total.add(answer.usage)
    return total


def _begins(service: Service, body: CompletionRequest, jobs: Sequence[Job]) -> Begins:
    """Return what precedes the answers to each prompt: the echo of the decoder's text, and the prompts as processed."""
    given = decoder_prompts(body) if service.info.is_encoder_decoder else body.prompts
    keep = service.max_model_len - 1 if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    found: Begins = []
    for job, prompt in zip(jobs, given, strict=True):
        ids, echo = job.prompt_token_ids, ""
        if body.echo and isinstance(prompt, str) and len(ids) != keep:
            echo = prompt
        elif body.echo:
            echo = service.text.decode(ids, skip_special_tokens=False)
        found.append((echo, processed_prompts(service.text, job) if body.return_prompts else {}))
    return found
