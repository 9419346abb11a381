"""Requests out of the API's own description: a few that are always the same, or FUZZ_EXAMPLES drawn ones of each kind.

`make fuzz` makes the long run; FUZZ_SEED=N makes the same requests again.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from proxy.api.openapi import document
from tests.proxy.streams import events

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES") or 0)
SEED = int(os.environ.get("FUZZ_SEED") or random.SystemRandom().randrange(10**6))
FEW = 20
"""Of each kind in the test suite. Making them is what takes the time: 0.2 s for each conversation."""
ANSWER_TIMEOUT_S = 60.0
"""An answer that takes longer is a hang."""
TEXT_ONLY = json.loads(json.dumps(document()).replace('"format": "binary", ', ""))
"""schemathesis cannot make what is no file out of a file, and breaks where it tries."""
SCHEMAS = {
    GenerationMode.POSITIVE: schemathesis.openapi.from_dict(document()),
    GenerationMode.NEGATIVE: schemathesis.openapi.from_dict(TEXT_ONLY),
}
for _schema in SCHEMAS.values():
    _schema.config.max_stream_events = sys.maxsize  # else it reads 20 of each stream, and leaves

Test = Callable[..., None]


def examples(few: int = FEW) -> Callable[[Test], Test]:
    """How often, and how, a hypothesis test draws: `few` times and always the same, but for a long run."""
    frugal = settings(
        max_examples=EXAMPLES or few,
        derandomize=not EXAMPLES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: frugal(seed(SEED)(test) if EXAMPLES else test)


def fuzz(
    base_url: str,
    path: str,
    method: str,
    mode: GenerationMode,
    adapt: Callable[[Any, random.Random], Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Counter[int]:
    """Send different requests, of which none may hang or be answered with a 5xx; how often which status came.

    `adapt` makes of every other body one that gets further.
    """
    statuses: Counter[int] = Counter()

    @examples()
    @given(case=SCHEMAS[mode][path][method].as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        number = statuses.total()
        if adapt is not None and number % 2:
            case.body = adapt(case.body, random.Random(number))
        response = case.call(base_url=base_url, headers=headers, timeout=ANSWER_TIMEOUT_S)
        statuses[response.status_code] += 1
        assert response.status_code < 500, (case.body, response.text)
        if "text/event-stream" in response.headers.get("content-type", [""])[0]:
            assert not response.stream_cut_short, (case.body, response.text)
            assert stream_error(response) < 500, (case.body, response.text)

    send()
    print(f"\nFUZZ_SEED={SEED}, {method} {path}, {mode.value}: {dict(sorted(statuses.items()))}")
    return statuses


def stream_error(response: Any) -> int:
    """The status of the error that a stream ended with, by its type; 200 where it had none."""
    errors = [event["error"] for event in events(response) if "error" in event]
    return 500 if any(error["type"] == "server_error" for error in errors) else 200
