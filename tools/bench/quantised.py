"""`python -m tools.bench.quantised FOLDER`: one stream with 8-bit weights beside the same in full, and the drift.

Engines take turns within one run, and swap places between repetitions. Drift is told over a text by the model itself:
perplexity, the mean difference of the log probabilities of its tokens, and how often the most likely token is another.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import typer

from common.process import openmp

if TYPE_CHECKING:
    from common.sampling_params import SamplingParams
    from engine.llm import LLM

_PROMPT: Final = [{"role": "user", "content": "Tell me the history of the lighthouse, in detail."}]


def bench(
    model: Annotated[str, typer.Argument(help="A folder, a hub id or a bundled name.")],
    text: Annotated[Path, typer.Option(help="A text to measure drift over.")] = Path("LICENSE"),
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of both engines.")] = "bfloat16",
    tokens: Annotated[int, typer.Option(min=2, help="Of one answer.")] = 128,
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = 5,
    characters: Annotated[int, typer.Option(min=2, help="Of the text.")] = 4096,
) -> None:
    """Measure the milliseconds of a token with a single stream, and drift."""
    openmp.set_defaults(os.environ)
    from common.sampling_params import SamplingParams
    from engine.llm import LLM

    given: Literal["float32", "bfloat16"] = "float32" if dtype == "float32" else "bfloat16"
    engines = {
        "plain": LLM(model, dtype=given, max_num_seqs=1),
        "int8": LLM(model, dtype=given, max_num_seqs=1, quantization="int8"),
    }
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for repetition in range(repetitions + 1):
        for name in list(engines)[:: 1 if repetition % 2 else -1]:
            start = time.perf_counter()
            engines[name].chat(_PROMPT, params)
            if repetition:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
    for name, turns in seconds.items():
        each = ", ".join(f"{1e3 * turn / tokens:.1f}" for turn in turns)
        print(f"{name}: {1e3 * statistics.median(turns) / tokens:.1f} ms per token (turns: {each})")
    ratios = [plain / small for plain, small in zip(seconds["plain"], seconds["int8"], strict=True)]
    print(f"int8 is {statistics.median(ratios):.2f} times as fast, {min(ratios):.2f} to {max(ratios):.2f} by pairs")
    _tell_drift(engines["plain"], engines["int8"], text.read_text()[:characters], params)


def _tell_drift(plain: LLM, small: LLM, text: str, params: SamplingParams) -> None:
    asked = msgspec.structs.replace(params, prompt_logprobs=1, max_tokens=1)
    one, other = (llm.generate([text], asked)[0] for llm in (plain, small))
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)
        if mine is not None and theirs is not None
    ]
    for name, side in (("plain", 0), ("int8", 1)):
        mean = statistics.fmean(pair[side].logprob for pair in pairs)
        print(f"{name}: perplexity {math.exp(-mean):.4f} over {len(pairs)} tokens")
    distance = statistics.fmean(abs(mine.logprob - theirs.logprob) for mine, theirs in pairs)
    changed = statistics.fmean(mine.top[0][0] != theirs.top[0][0] for mine, theirs in pairs)
    print(
        f"log probabilities differ by {distance:.4f} on average; another most likely token at {changed:.1%} of places"
    )


def main() -> None:
    typer.run(bench)


if __name__ == "__main__":
    main()
