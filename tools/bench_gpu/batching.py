"""Many requests of text at once through `LLM`, beside transformers' continuous batching on the same device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from engine.llm import LLM, TokensPrompt
from tools.bench_gpu.attempts import attempted
from tools.bench_gpu.attention import Attention, of_decoder
from tools.bench_gpu.decode import least_step_s
from tools.bench_gpu.engines import MEMORY_FRACTION, endless, random_prompt
from tools.bench_gpu.setup import Setup
from tools.gpu_check.figures import Figure, rate, ratio
from tools.gpu_check.shapes import qwen2_3b

REQUESTS, TOKENS_IN, TOKENS_OUT, REPETITIONS = 64, (64, 512), 128, 2
WARM_UP_TOKENS_OUT: Final = 16
"""Of the first turn, which is not counted: its prompts and its first steps bring all that is made once."""
TOY_REQUESTS, TOY_TOKENS_IN, TOY_TOKENS_OUT = 3, (4, 12), 4
TOY_BLOCKS: Final = {"num_blocks": 16, "max_batch_tokens": 64}
STALLED_S: Final = 60.0
"""Without a single answer: then transformers' thread has died."""
_LIMIT: Final = "limit: the weights read once for a token of each; prompts, keys and values left out"
Prompts = list[list[int]]


def measure(setup: Setup) -> Iterator[Figure]:
    """Generated tokens per second of both, from the first request to the last token, one after the other: each has the
    device for itself. What they set up once, memory and graphs, is not counted."""
    folder = setup.model(qwen2_3b)
    count, limits, tokens_out = (
        (TOY_REQUESTS, TOY_TOKENS_IN, TOY_TOKENS_OUT) if setup.toy else (REQUESTS, TOKENS_IN, TOKENS_OUT)
    )
    rng = random.Random(0)
    prompts = [[random_prompt(rng.randint(*limits), rng) for _ in range(count)] for _ in range(REPETITIONS + 1)]
    case = f"{count} requests, {limits[0]} to {limits[1]} tokens in, {tokens_out} out"
    seconds: list[list[float]] = []
    limit = count / least_step_s(setup.limits, folder, setup.dtype, count)

    def our_figure() -> Iterator[Figure]:
        took_s, attention = _ours(setup, folder, prompts, tokens_out)
        seconds.append(took_s)
        yield attention.of(rate("batching", case, "tokens/s", took_s, count * tokens_out, limit, _LIMIT))

    def their_figure() -> Iterator[Figure]:
        took_s, attention = _theirs(setup, folder, prompts, tokens_out)
        beside = f"Triptych is {ratio(seconds[0], took_s)} that" if seconds else ""
        figure = rate("batching", f"{case}, transformers", "tokens/s", took_s, count * tokens_out, limit, beside)
        yield attention.of(figure)

    yield from attempted("batching", case, our_figure)
    yield from attempted("batching", f"{case}, transformers", their_figure)


def _ours(setup: Setup, folder: Path, prompts: list[Prompts], tokens_out: int) -> tuple[list[float], Attention]:
    """Seconds of each turn but the first, which warms up, and whose attention it was."""
    share = {"memory_fraction": MEMORY_FRACTION} if setup.device.type == "cuda" else {}
    llm = LLM(folder, device=setup.device.type, load_format="dummy", max_num_batched_tokens=8192, **share)

    def generate(batch: Prompts, num_tokens: int) -> list[int]:
        outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in batch], endless(num_tokens))
        return [len(output.outputs[0].token_ids) for output in outputs]

    return _timed_turns(generate, prompts, tokens_out), of_decoder(llm.decoder)


def _theirs(setup: Setup, folder: Path, prompts: list[Prompts], tokens_out: int) -> tuple[list[float], Attention]:
    """The same of transformers, greedy, and the attention that it has chosen. It finds its own sizes on a GPU.

    Its manager is held open over all turns: `generate_batch` would make a new one, cache and graphs, for each.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    with setup.device:  # random weights, drawn where they stay
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=setup.dtype, attn_implementation="sdpa"
        ).eval()
    wanted = GenerationConfig(max_new_tokens=tokens_out, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(**(TOY_BLOCKS if setup.toy else {"max_memory_percent": MEMORY_FRACTION}))
    with ExitStack() as stack:
        manager = stack.enter_context(
            model.continuous_batching_context_manager(
                generation_config=wanted, continuous_batching_config=sizes, timeout=STALLED_S
            )
        )
        seconds = _timed_turns(partial(_batch, manager), prompts, tokens_out)
        return seconds, Attention(f"transformers' {model.config._attn_implementation}")


def _batch(manager: Any, prompts: Prompts, tokens_out: int) -> list[int]:
    """How many tokens came of each request. Raises TimeoutError where nothing comes any more."""
    manager.add_requests(inputs=prompts, max_new_tokens=tokens_out)
    counts: list[int] = []
    while len(counts) < len(prompts):
        answer = manager.get_result(timeout=STALLED_S)
        if answer is None:
            raise TimeoutError(f"{len(counts)} of {len(prompts)} answers after {STALLED_S:.0f} s without another one")
        if answer.is_finished():
            counts.append(len(answer.generated_tokens))
    return counts


def _timed_turns(generate: Callable[[Prompts, int], list[int]], prompts: list[Prompts], tokens_out: int) -> list[float]:
    """Seconds of each turn but the first one."""
    first, *others = prompts
    _timed(generate, first, min(tokens_out, WARM_UP_TOKENS_OUT))
    return [_timed(generate, batch, tokens_out) for batch in others]


def _timed(generate: Callable[[Prompts, int], list[int]], prompts: Prompts, tokens_out: int) -> float:
    began = time.perf_counter()
    counts = generate(prompts, tokens_out)
    took_s = time.perf_counter() - began
    if counts != [tokens_out] * len(prompts):
        raise RuntimeError(f"{tokens_out} tokens were wanted of each of {len(prompts)} requests, there are {counts}")
    return took_s
