"""Sends one ask and says exactly what came back: tokens, a clean refusal, a closed connection, or neither."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from launch.cli.client import read_events
from tools.soak.asks import Ask

Ending = Literal["whole", "left", "refused", "closed", "broken"]
"""`whole`: the answer to its end. `left`: by us. `refused`: an error in OpenAI's shape that says that the same request
may succeed later (429, 503, 504). `closed`: the connection was refused or ended in the middle. `broken`: anything else.
"""
RETRYABLE = ("overloaded", "unavailable", "timeout")


@dataclass
class Reply:
    """What a client got. `tokens`: of each choice, by its index; of a streamed transcription only the text is told."""

    ending: Ending = "broken"
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish: dict[int, str] = field(default_factory=dict)
    error: str = ""

    def equals(self, other: Reply) -> bool:
        """Whether both are whole and say the same."""
        same = (self.tokens, self.text, self.finish) == (other.tokens, other.text, other.finish)
        return same and self.ending == other.ending == "whole"

    def begins(self, whole: Reply) -> bool:
        """Whether all that has come is how `whole` begins."""
        return all(whole.tokens.get(i, [])[: len(ids)] == ids for i, ids in self.tokens.items()) and all(
            whole.text.get(i, "").startswith(text) for i, text in self.text.items()
        )


async def send(http: httpx.AsyncClient, ask: Ask) -> Reply:
    """Send one ask and read its answer to the end, or to where the client leaves. Raises nothing."""
    reply = Reply()
    try:
        await (_stream if ask.stream else _whole)(http, ask, reply)
    except (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
        reply.ending, reply.error = "closed", repr(error)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
        reply.ending, reply.error = "broken", repr(error)
    return reply


async def _whole(http: httpx.AsyncClient, ask: Ask, reply: Reply) -> None:
    response = await http.request("POST", ask.path, **_content(ask))
    if not response.is_success:
        _refuse(reply, response.json(), response)
        return
    for choice in _choices(response.json()):
        index = choice.get("index", 0)
        reply.tokens[index] = list(choice["token_ids"])
        reply.text[index] = _text_of(choice)
        reply.finish[index] = choice.get("finish_reason") or ""
    reply.ending = "whole"


async def _stream(http: httpx.AsyncClient, ask: Ask, reply: Reply) -> None:
    async with http.stream("POST", ask.path, **_content(ask)) as response:
        if not response.is_success:
            _refuse(reply, json.loads(await response.aread()), response)
            return
        reply.error = "the stream ended without [DONE]"
        reply.ending = "closed"
        num_events = 0
        async for event in read_events(response.aiter_lines()):
            if event is None:
                if reply.ending == "closed":
                    reply.ending, reply.error = "whole", ""
                return
            if "error" in event:
                _refuse(reply, event, None)
                continue
            _add(event, reply)
            num_events += 1
            if num_events == ask.leave_after:
                reply.ending, reply.error = "left", ""
                return


def _content(ask: Ask) -> dict[str, Any]:
    """What httpx sends: JSON, or a form where there are files."""
    body = ask.body | {"stream": ask.stream}
    if not ask.files:
        return {"json": body}
    form = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in body.items()}
    return {"data": form, "files": ask.files}


def _refuse(reply: Reply, body: dict[str, Any], response: httpx.Response | None) -> None:
    """An error of OpenAI's shape; one to be repeated must say when, where it has headers to say so in."""
    error = body["error"]
    clean = error["code"] in RETRYABLE and {"message", "type", "param"} <= error.keys()
    if response is not None and response.status_code in (429, 503):
        clean = clean and "retry-after" in response.headers
    reply.ending = "refused" if clean else "broken"
    reply.error = f"{error['code']}: {error['message']}"


def _add(event: dict[str, Any], reply: Reply) -> None:
    """One event of a stream: a chunk of a chat or a completion, or a piece of a transcript."""
    if event.get("type") == "transcript.text.delta":
        reply.text[0] += event["delta"]
    elif event.get("type") == "transcript.text.done":
        reply.text[0] = event["text"]
    for choice in event.get("choices", []):
        reply.tokens[choice["index"]] += choice.get("token_ids") or []
        reply.text[choice["index"]] += _text_of(choice)
        if choice.get("finish_reason"):
            reply.finish[choice["index"]] = choice["finish_reason"]


def _choices(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer; a transcript is one by itself."""
    return body.get("choices") or [body]


def _text_of(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or choice
    return message.get("content") or message.get("text") or ""
