"""`python -m tools.bench.sharing`: what it saves that equal audio is encoded, projected and held once.

Eight requests over one clip against eight over different clips, at once and one after another, in one process.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from common.process import openmp

if TYPE_CHECKING:
    from engine.llm import LLM

NUM_REQUESTS = 8


@dataclass(frozen=True)
class Usage:
    """What a batch of requests took: seconds, encoder runs, and the most KV blocks in use at once."""

    seconds: float
    encoder_runs: int
    peak_blocks: int


def compare(
    model: Annotated[str, typer.Argument(help="A Whisper model's folder.")],
    dtype: Annotated[str, typer.Option()] = "float32",
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Print time and memory of equal and of different clips."""
    openmp.set_defaults(os.environ)
    from engine.llm import LLM
    from tools.bench.report import markdown
    from tools.bench.workloads import make_workload

    workload = make_workload(model)
    llm = LLM(model, dtype=dtype)
    _run(llm, [request.clip for request in workload.requests(2, seed=-1)])
    block_kib = llm.decoder.stats()["kv_block_bytes"] / 2**10
    rows = []
    for repetition in range(repetitions):
        clips = [request.clip for request in workload.requests(NUM_REQUESTS + 1, seed=repetition)]
        cases = {
            "eight different": clips[:NUM_REQUESTS],
            "eight times the same": [clips[-1]] * NUM_REQUESTS,
            "the same once more": [clips[-1]],
        }
        for name, batch in cases.items():
            used = _run(llm, batch)
            memory = f"{used.peak_blocks * block_kib / 2**10:.1f}"
            rows.append((repetition + 1, name, f"{used.seconds:.2f}", used.encoder_runs, used.peak_blocks, memory))
    print(markdown(("repetition", "clips", "seconds", "encoder runs", "KV blocks at most", "MiB of KV cache"), rows))


def _run(llm: LLM, clips: list[bytes]) -> Usage:
    from common.sampling_params import SamplingParams
    from common.text import whisper_prompt
    from engine.core.encoder_engine import encoder_computations

    prompt, rules = whisper_prompt.build(llm.info, llm.text, language="en" if _is_multilingual(llm) else None)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 80, **rules})
    before, start = encoder_computations.value, time.perf_counter()
    for clip in clips:
        llm.add({"prompt_token_ids": prompt, "multi_modal_data": {"audio": clip}}, params)
    finished = peak = 0
    while finished < len(clips):
        finished += len(llm.step())
        peak = max(peak, int(llm.decoder.stats()["kv_blocks_used"]))
    return Usage(time.perf_counter() - start, encoder_computations.value - before, peak)


def _is_multilingual(llm: LLM) -> bool:
    return bool(llm.info.generation.get("is_multilingual", True))


if __name__ == "__main__":
    typer.run(compare)
