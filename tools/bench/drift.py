"""`python -m tools.bench.drift`: how far bfloat16 drifts from float32, on a real checkpoint.

The same prompts in both. Agreement counts greedy tokens until the first that differs; the error of log-probabilities is
that of equal tokens in equal places: bfloat16 scores the text that float32 has written.
"""

from __future__ import annotations

import os
import statistics
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.process import openmp

if TYPE_CHECKING:
    from engine.llm import LLM, RequestOutput

NUM_PROMPTS = 32
NUM_TOKENS = 64


def compare(model: Annotated[str, typer.Argument(help="Folder of a text model.")]) -> None:
    """Print agreement of greedy tokens, and mean and largest error of log-probabilities."""
    openmp.set_defaults(os.environ)
    from engine.llm import LLM
    from tools.bench.workloads import make_workload

    prompts = [request.prompt_token_ids for request in make_workload(model).requests(NUM_PROMPTS, seed=0)]
    exact, short = LLM(model, dtype="float32"), LLM(model, dtype="bfloat16")
    texts, others = (
        [one.outputs[0].token_ids for one in _generate(llm, prompts, max_tokens=NUM_TOKENS, ignore_eos=True)]
        for llm in (exact, short)
    )
    agreed = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=True)))
        for both in zip(texts, others, strict=True)
    ]
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    errors = [abs(a - b) for a, b in zip(_score(exact, whole), _score(short, whole), strict=True)]
    total = sum(map(len, texts))
    print(f"prompts: {NUM_PROMPTS} of {len(prompts[0])} tokens; greedy, {NUM_TOKENS} tokens each")
    print(f"tokens equal up to the first difference: {sum(agreed)} of {total} ({sum(agreed) / total:.1%})")
    print(f"answers equal to the end: {sum(n == NUM_TOKENS for n in agreed)} of {NUM_PROMPTS}")
    print(f"first tokens equal: {sum(n > 0 for n in agreed)} of {NUM_PROMPTS}")
    mean, middle = statistics.mean(errors), statistics.median(errors)
    print(f"log-probability error: mean {mean:.4f}, median {middle:.4f}, largest {max(errors):.3f}")


def _generate(llm: LLM, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    from common.sampling_params import SamplingParams
    from common.text.prompts import TokensPrompt

    params = SamplingParams(**{"temperature": 0.0, **options})
    return llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params)


def _score(llm: LLM, texts: list[list[int]]) -> list[float]:
    """Return the log-probabilities of all tokens of all texts but the first of each."""
    outputs = _generate(llm, texts, max_tokens=1, prompt_logprobs=0)
    return [one.logprob for output in outputs for one in output.prompt_logprobs if one is not None]


if __name__ == "__main__":
    typer.run(compare)
