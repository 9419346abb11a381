"""Many requests of text at once through `LLM`, beside transformers' continuous batching on the same device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from engine.llm import LLM, TokensPrompt
from launch.gpu.bench.engines import endless, random_prompt
from launch.gpu.bench.setup import Setup
from launch.gpu.figures import Figure, rate, ratio
from launch.gpu.shapes import qwen2_3b

REQUESTS, TOKENS_IN, TOKENS_OUT, REPETITIONS = 64, (64, 512), 128, 3
TOY_REQUESTS, TOY_TOKENS_IN, TOY_TOKENS_OUT = 3, (4, 12), 4
TOY_BLOCKS: Final = {"num_blocks": 16, "max_batch_tokens": 64}
Prompts = list[list[int]]


def measure(setup: Setup) -> list[Figure]:
    """Generated tokens per second of both, from the first request to the last token, in turns."""
    folder = setup.model(qwen2_3b)
    count, limits, tokens_out = (
        (TOY_REQUESTS, TOY_TOKENS_IN, TOY_TOKENS_OUT) if setup.toy else (REQUESTS, TOKENS_IN, TOKENS_OUT)
    )
    rng = random.Random(0)
    prompts = [[random_prompt(rng.randint(*limits), rng) for _ in range(count)] for _ in range(REPETITIONS + 1)]
    systems = {"triptych": _ours(setup, folder, tokens_out), "transformers": _theirs(setup, folder, tokens_out)}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number, batch in enumerate(prompts):
        for name, generate in systems.items():
            took_s = _timed(generate, batch, tokens_out)
            if number > 0:  # the first turn warms up
                seconds[name].append(took_s)
    case = f"{count} requests, {limits[0]} to {limits[1]} tokens in, {tokens_out} out"
    beside = f"{ratio(seconds['triptych'], seconds['transformers'])} transformers'"
    return [
        rate("batching", case, "tokens/s", seconds["triptych"], count * tokens_out, beside=beside),
        rate("batching", f"{case}, transformers", "tokens/s", seconds["transformers"], count * tokens_out),
    ]


def _timed(generate: Callable[[Prompts], list[int]], prompts: Prompts, tokens_out: int) -> float:
    began = time.perf_counter()
    counts = generate(prompts)
    took_s = time.perf_counter() - began
    if counts != [tokens_out] * len(prompts):
        raise RuntimeError(f"{tokens_out} tokens were wanted of each of {len(prompts)} requests, there are {counts}")
    return took_s


def _ours(setup: Setup, folder: Path, tokens_out: int) -> Callable[[Prompts], list[int]]:
    """Half of the device's memory is the other system's."""
    llm = LLM(folder, device=setup.device.type, load_format="dummy", memory_fraction=0.45, max_num_batched_tokens=8192)
    params = endless(tokens_out)

    def generate(prompts: Prompts) -> list[int]:
        outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


def _theirs(setup: Setup, folder: Path, tokens_out: int) -> Callable[[Prompts], list[int]]:
    """`generate_batch` as its documentation has it, greedy; it finds its own sizes on a GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    dtype = torch.bfloat16 if setup.device.type == "cuda" else torch.float32
    with setup.device:  # random weights, drawn where they stay
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation="sdpa"
        )
    wanted = GenerationConfig(max_new_tokens=tokens_out, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(**(TOY_BLOCKS if setup.toy else {"max_memory_percent": 0.8}))

    def generate(prompts: Prompts) -> list[int]:
        answers = model.generate_batch(
            inputs=prompts, generation_config=wanted, continuous_batching_config=sizes, progress_bar=False
        )
        return [len(answer.generated_tokens) for answer in answers.values()]

    return generate
