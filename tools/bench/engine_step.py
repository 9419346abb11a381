"""`python -m tools.bench.engine_step`: where the time of an engine's step goes, on a real checkpoint.

Two tables: input preparation by the number of decoding sequences, and a decode step by part. Times are wall time on the
engine's thread; the smallest of many steps is what the step costs, the median what it took beside everything else that
the machine did.
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
    """Print both tables as markdown."""
    openmp.set_defaults(os.environ)
    from common.config import EngineConfig
    from common.model_info import load_model_info

    print(preparation_table((1, 16, 64, 256, 1024)))
    print("\n| in flight | step, ms | median |", *(f" {part} |" for part in PARTS), " schedule + prepare |", sep="")
    print("|" + "---|" * (len(PARTS) + 4))
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
        print(_step_row(info, config, count, prompt_tokens, steps), flush=True)


def preparation_table(counts: tuple[int, ...], repetitions: int = 200) -> str:
    """Microseconds of `update_all` and `prepare` in steady decoding, 16 tokens to a block."""
    lines = ["| sequences | update, µs | prepare, µs | together, median |", "|---|---|---|---|"]
    for count in counts:
        update, prepare = measure_preparation(count, repetitions)
        median = statistics.median(a + b for a, b in zip(update, prepare, strict=True))
        lines.append(f"| {count} | {min(update) * 1e6:.0f} | {min(prepare) * 1e6:.0f} | {median * 1e6:.0f} |")
    return "\n".join(lines)


def measure_preparation(count: int, repetitions: int) -> tuple[list[float], list[float]]:
    """Seconds of both halves, for sequences of 150 tokens and more that grow by one token a step."""
    from engine.state.inputs import InputBuffers

    buffers = InputBuffers(count, 4096, 16)
    slots = [buffers.acquire_slot() for _ in range(count)]
    tokens = [list(range(150 + index % 16)) for index in range(count)]
    update, prepare = [], []
    for _ in range(repetitions):
        for token_ids in tokens:
            token_ids.append(7)
        blocks = [list(range(1, 2 + len(token_ids) // 16)) for token_ids in tokens]
        computed = [len(token_ids) - 1 for token_ids in tokens]
        start = time.perf_counter()
        buffers.update_all(slots, tokens, blocks, computed)
        middle = time.perf_counter()
        buffers.prepare(slots, [1] * count)
        update.append(middle - start)
        prepare.append(time.perf_counter() - middle)
    return update, prepare


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


def _warmed_up(stats: dict[str, float], count: int) -> bool:
    """All sequences decode, and have done so for a while."""
    return stats["last_step_tokens"] == count and stats["generated_tokens_total"] >= count * WARMUP_STEPS


def _step_row(info: ModelInfo, config: EngineConfig, count: int, prompt_tokens: int, steps: int) -> str:
    from common.sampling_params import SamplingParams
    from engine.core.decoder_engine import DecoderEngine
    from engine.models import layers

    engine, draw = DecoderEngine(info, config), random.Random(0)
    vocabulary = engine.runner.spec.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=steps + WARMUP_STEPS + 8, ignore_eos=True)
    for index in range(count):
        engine.add_request(str(index), [draw.randrange(vocabulary) for _ in range(prompt_tokens)], [], params)
    while not _warmed_up(engine.stats(), count):
        engine.step()
    totals: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        clock = PartClock()
        with ExitStack() as watched:
            for owner, name, part in (
                (engine.scheduler, "schedule", "schedule"),
                (engine.runner.buffers, "update_all", "prepare"),
                (engine.runner.buffers, "prepare", "prepare"),
                (engine.runner.backend, "plan", "prepare"),
                (engine.runner.backend, "run", "attention"),
                (engine.runner.backend, "write", "attention"),
                (layers.Linear, "forward", "linear"),
                (engine.runner.model, "forward", "forward, the rest"),
                (engine.runner, "logits", "logits"),
                (engine.sampler, "sample", "sample"),
            ):
                watched.enter_context(clock.on(owner, name, part))
            start = time.perf_counter()
            engine.step()
            totals.append(time.perf_counter() - start)
        clock.seconds["the rest"] = totals[-1] - sum(clock.seconds.values())
        for part in PARTS:
            parts[part].append(clock.seconds[part])
    ms = {part: min(values) * 1e3 for part, values in parts.items()}
    cells = [f"{min(totals) * 1e3:.1f}", f"{statistics.median(totals) * 1e3:.1f}", *(f"{ms[p]:.2f}" for p in PARTS)]
    share = (ms["schedule"] + ms["prepare"]) / (min(totals) * 1e3)
    return f"| {count} | {' | '.join(cells)} | {share:.1%} |"


if __name__ == "__main__":
    typer.run(main)
