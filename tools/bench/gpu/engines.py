"""Engines with random weights, filled with requests and driven to the point that is measured."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Final, Self

from common.config import EngineConfig
from common.messages import Failed, Generate, Tokens
from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from engine.core.decoder_engine import DecoderEngine
from engine.state.events import Event
from tools.bench.gpu.setup import Setup
from tools.gpu_check.shapes import Shape

DEADLINE_S: Final = 120.0
WARM_UP_TOKENS: Final = 4
_FIRST_TOKEN, _LAST_TOKEN = 0, 390
"""Ids of ordinary tokens in every shape; the special ones follow."""
MEMORY_FRACTION: Final = 0.4
"""Of the device, for each engine here: enough for the largest batch, and for another one beside it."""


def make_decoder(setup: Setup, make: Callable[..., Shape], **options: Any) -> DecoderEngine:
    """Return a decoder with random weights. `options` are those of EngineConfig."""
    info = load_model_info(str(setup.model(make)))
    share = {"memory_fraction": MEMORY_FRACTION} if setup.device.type == "cuda" else {}
    return DecoderEngine(info, EngineConfig(device=setup.device.type, load_format="dummy", **share, **options))


def random_prompt(length: int, rng: random.Random) -> list[int]:
    return [rng.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(length)]


def endless(max_tokens: int) -> SamplingParams:
    """Greedy, and no token ends it before `max_tokens`."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


class Driver:
    """Steps a decoder and counts the tokens of each request. Raises RuntimeError for one that fails."""

    def __init__(self, engine: DecoderEngine) -> None:
        self.engine = engine
        self.num_tokens: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        """A request without inputs."""
        self.num_tokens[name] = 0
        self.engine.add_request(Generate(name, prompt, [], params))

    def step(self) -> list[Event]:
        events = self.engine.step()
        for event in events:
            if isinstance(event, Failed):
                raise RuntimeError(f"request {event.request_id} failed: {event.error.message}")
            if isinstance(event, Tokens) and event.request_id in self.num_tokens:
                self.num_tokens[event.request_id] += len(event.token_ids)
        return events

    def until(self, num_tokens: int) -> None:
        """Step until each request has so many tokens. Raises TimeoutError if that takes too long."""
        self._step_until(lambda: min(self.num_tokens.values()) >= num_tokens, f"{num_tokens} tokens of every request")

    def time_steps(self, setup: Setup, steps: int) -> tuple[list[float], int]:
        """Seconds of a step, each the mean of so many, and how many were launched anew though steps are recorded."""
        graphs, counters = self.engine.runner.graphs, self.engine.loop.counters
        replayed, before = 0 if graphs is None else graphs.num_replays, counters["steps"]
        seconds = setup.time(self.step, calls=steps)
        return seconds, 0 if graphs is None else counters["steps"] - before - (graphs.num_replays - replayed)

    def abort_all(self) -> None:
        """Abort every request, and wait until their blocks are free. Raises TimeoutError if that takes too long."""
        for name in self.num_tokens:
            self.engine.abort(name)
        self.num_tokens.clear()
        self._step_until(lambda: not self.engine.has_work(), "end of aborted requests")

    def _step_until(self, is_done: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_done():
            self.step()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no {what} after {DEADLINE_S:.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave an engine that has nothing to do to what is measured next."""
        self.abort_all()
