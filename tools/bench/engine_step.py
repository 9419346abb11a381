"""`python -m tools.bench.engine_step`: where the time of an engine's step goes, on a real checkpoint.

A decode step by part. Times are wall time on the engine's thread; the smallest of many steps is what the step costs,
the median what it took beside everything else that the machine did.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.process import openmp

if TYPE_CHECKING:
    from common.config import EngineConfig
    from common.model_info import ModelInfo
    from engine.core.decoder_engine import DecoderEngine

PARTS = ("schedule", "prepare", "linear", "attention", "forward, the rest", "logits", "sample", "the rest")
WARMUP_STEPS = 4


def main(
    model: Annotated[str, typer.Argument(help="Folder of a text model.")],
    in_flight: Annotated[str, typer.Option(help="Sequences at once, with commas.")] = "1,8,32",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1)] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to measure.")] = 48,
    attention_backend: Annotated[str, typer.Option(help="auto, or torch to leave out our own kernels.")] = "auto",
) -> None:
    """Print a table in markdown, a row for each number of sequences."""
    openmp.set_defaults(os.environ)
    from common.config import EngineConfig
    from common.model_info import load_model_info
    from tools.bench.report import markdown

    header = ("in flight", "step, ms", "median", *PARTS, "schedule + prepare")
    rows = []
    info = load_model_info(model)
    for count in map(int, in_flight.split(",")):
        config = EngineConfig.model_validate(
            {
                "device": "cpu",
                "dtype": dtype,
                "num_threads": threads,
                "max_num_seqs": count,
                "max_model_len": prompt_tokens + steps + WARMUP_STEPS + 16,
                "attention_backend": attention_backend,
            }
        )
        rows.append(_measure_steps(info, config, count, prompt_tokens, steps))
    print(markdown(header, rows))


class PartClock:
    """Seconds by part. A part inside another one is not counted twice: its time is taken off the outer one's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def on(self, owner: Any, name: str, part: str) -> Iterator[None]:
        """Count calls of `owner.name` until the end of the block."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - start
                self.seconds[part] += elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        own = name in vars(owner)
        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, original) if own else delattr(owner, name)


def _measure_steps(info: ModelInfo, config: EngineConfig, count: int, prompt_tokens: int, steps: int) -> list[object]:
    """Return a row: milliseconds of whole steps and of their parts, in steady decoding of `count` sequences."""
    from common.sampling_params import SamplingParams
    from engine.core.decoder_engine import DecoderEngine

    engine, draw = DecoderEngine(info, config), random.Random(0)
    vocabulary = engine.runner.spec.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=steps + WARMUP_STEPS + 8, ignore_eos=True)
    for index in range(count):
        engine.add_request(str(index), [draw.randrange(vocabulary) for _ in range(prompt_tokens)], [], params)
    while (stats := engine.stats())["last_step_tokens"] != count or (
        stats["generated_tokens_total"] < count * WARMUP_STEPS
    ):
        engine.step()
    totals: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        clock = PartClock()
        with ExitStack() as watched:
            for owner, name, part in _watched_calls(engine):
                watched.enter_context(clock.on(owner, name, part))
            start = time.perf_counter()
            engine.step()
            totals.append(time.perf_counter() - start)
        clock.seconds["the rest"] = totals[-1] - sum(clock.seconds.values())
        for part in PARTS:
            parts[part].append(clock.seconds[part])
    ms = {part: min(values) * 1e3 for part, values in parts.items()}
    step_ms, share = min(totals) * 1e3, (ms["schedule"] + ms["prepare"]) / (min(totals) * 1e3)
    cells = (f"{step_ms:.1f}", f"{statistics.median(totals) * 1e3:.1f}", *(f"{ms[part]:.2f}" for part in PARTS))
    return [count, *cells, f"{share:.1%}"]


def _watched_calls(engine: DecoderEngine) -> tuple[tuple[Any, str, str], ...]:
    """Return owner, name and part of every call that is timed."""
    from engine.models import layers

    runner = engine.runner
    return (
        (engine.scheduler, "schedule", "schedule"),
        (runner.buffers, "update_all", "prepare"),
        (runner.buffers, "prepare", "prepare"),
        (runner.backend, "plan", "prepare"),
        (runner.backend, "run", "attention"),
        (runner.backend, "write", "attention"),
        (layers.Linear, "forward", "linear"),
        (runner.model, "forward", "forward, the rest"),
        (runner, "logits", "logits"),
        (engine.sampler, "sample", "sample"),
    )


if __name__ == "__main__":
    typer.run(main)
