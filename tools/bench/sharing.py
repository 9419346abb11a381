"""`python -m tools.bench.sharing`: what it saves that equal audio is encoded, projected and held once.

Eight requests over one clip against eight over different clips, at once and one after another, in one process.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from common.process import openmp

if TYPE_CHECKING:
    from engine.llm import LLM

NUM_REQUESTS = 8


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

    workload, llm, rows = make_workload(model), LLM(model, dtype=dtype), []
    _run(llm, [request.clip for request in workload.requests(2, seed=-1)])
    for repetition in range(repetitions):
        clips = [request.clip for request in workload.requests(NUM_REQUESTS + 1, seed=repetition)]
        cases = {
            "eight different": clips[:NUM_REQUESTS],
            "eight times the same": [clips[-1]] * NUM_REQUESTS,
            "the same once more": [clips[-1]],
        }
        rows += [(repetition + 1, name, *_run(llm, batch)) for name, batch in cases.items()]
    print(markdown(("repetition", "clips", "seconds", "encoder runs", "KV blocks at most", "MiB of KV cache"), rows))


def _run(llm: LLM, clips: list[bytes]) -> tuple[str, int, int, str]:
    """Return seconds, encoder runs, and the most KV in use at once: blocks, and MiB."""
    from common.sampling_params import SamplingParams
    from common.text import whisper_prompt
    from engine.core.encoder_engine import encoder_computations

    language = "en" if whisper_prompt.is_multilingual(llm.info) else None
    prompt, rules = whisper_prompt.build(llm.info, llm.text, language=language)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 80, **rules})
    before, start = encoder_computations.value, time.perf_counter()
    for clip in clips:
        llm.add({"prompt_token_ids": prompt, "multi_modal_data": {"audio": clip}}, params)
    finished = peak = 0
    while finished < len(clips):
        finished += len(llm.step())
        peak = max(peak, int(llm.decoder.stats()["kv_blocks_used"]))
    seconds, runs = time.perf_counter() - start, encoder_computations.value - before
    return f"{seconds:.2f}", runs, peak, f"{peak * llm.decoder.stats()['kv_block_bytes'] / 2**20:.1f}"


if __name__ == "__main__":
    typer.run(compare)
