"""Ask a cluster in containers, hold its workers' counters to the answers, and ask again while workers die and restart.

Usage: python -m tools.compose.asking QUESTIONS MAX_TOKENS [FILE]
The same questions go round as long as FILE is there. Exits with 1, and a sentence, where a counter has not grown by
exactly the work for the answers, or an answer is cut, refused, or differs from the first to its question.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any, Final

import httpx

from common.config import Settings
from common.keys import bearer, own_api_key
from launch.cli.client import Media
from launch.cli.members import Members
from tools.bench.workloads import draw_picture
from tools.compose.endpoints import get
from tools.soak.asking import send
from tools.soak.asks import Ask
from tools.soak.tally import Judge

IN_FLIGHT: Final = 4
COUNTER: Final = (
    "^triptych_(prefills_ended|prefill_handoffs|generated_tokens|proxy_retries|tensors_sent|prefill_handoff_bytes)_total"
    "(?:{.*})? (.+)$"
)
SHOWN: Final = ("tensors_sent", "prefill_handoff_bytes")  # their numbers follow from the caches, too


def draw_ask(question: int, max_tokens: int) -> Ask:
    """Return a question, three of four about a picture: always the same sight, in bytes new to all caches."""
    content: list[dict[str, Any]] = [{"type": "text", "text": f"What do {question} signs say?"}]
    if question % 4:
        picture = Media("sign.png", "image/png", draw_picture(random.Random(question)) + os.urandom(8))
        content.append({"type": "image_url", "image_url": {"url": picture.data_url}})
    body = {"model": "signpost", "messages": [{"role": "user", "content": content}], "return_token_ids": True}
    body |= {"temperature": question % 2, "seed": question, "max_tokens": max_tokens // (1 + question % 3)}
    body |= {"logit_bias": {"393": -100}}  # never the token that ends a turn, by which the bundled model answers a word
    return Ask(f"question {question}", "/v1/chat/completions", body, stream=True, again=True)


async def ask_all(http: httpx.AsyncClient, asks: Iterator[Ask], judge: Judge) -> None:
    """Send asks, IN_FLIGHT at once. Tell of the first answer that could be compared: others flow at this moment."""

    async def ask_next() -> None:
        for ask in asks:
            reply = await send(http, ask)
            judge.note(ask, reply)
            if reply.ending == "refused":
                judge.tally.keep(f"{ask.name}: {reply.error}")
            if judge.tally.compared == 1:
                print(f"asking again, {IN_FLIGHT} at once", flush=True)

    await asyncio.gather(*(ask_next() for _ in range(IN_FLIGHT)))
    if judge.tally.wrong or judge.tally.endings.keys() != {"whole"}:
        sys.exit(f"not all answers are whole and right: {judge.tally}")


async def read_counters(http: httpx.AsyncClient, settings: Settings) -> Counter[str]:
    """Return what COUNTER matches by `role name`, summed over the instances of the role."""
    found = Counter[str]()
    async with Members(settings) as members:
        for record in (await members.records()).values():
            for name, value in re.findall(COUNTER, (await get(http, record, "metrics", settings)).text, re.M):
                found[f"{record.role} {name}"] += round(float(value))
    return found


async def main(questions: int, max_tokens: int, file: Path) -> None:
    settings, judge = Settings(), Judge()
    asks = (draw_ask(number % questions, max_tokens) for number in count())
    headers = {"Authorization": bearer(own_api_key(settings) or "")}
    async with httpx.AsyncClient(base_url="http://proxy:8000", headers=headers, timeout=600) as http:
        before = await read_counters(http, settings)
        await ask_all(http, islice(asks, questions), judge)
        after = await read_counters(http, settings)
        grown = after - before
        counted = ", ".join(f"{name} {number}" for name, number in sorted(grown.items()))
        print(f"{questions} answers with {judge.tally.tokens} tokens; counted by the workers: {counted}")
        right = {"prefill_decode generated_tokens": judge.tally.tokens}
        if "prefill prefills_ended" in after:
            right = dict.fromkeys(("prefill prefills_ended", "decode prefill_handoffs"), questions)
            right["decode generated_tokens"] = judge.tally.tokens
        if {name: number for name, number in grown.items() if not name.endswith(SHOWN)} != right:
            sys.exit(f"and not {right}")
        await ask_all(http, takewhile(lambda _: file.exists(), asks), judge)
        moved = (await read_counters(http, settings) - after)["proxy proxy_retries"]
    if compared := judge.tally.compared:
        print(f"asked again {compared} times: no answer lost, none other than before, {moved} moved to another worker")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(*sys.argv[3:] or ["/none"])))
