"""A cluster on one GPU answers what `LLM` does on it, in the same dtype: encoder, prefill and decode in turn.

Requests come one at a time: rounding depends on who shares a batch, so that only equal batches have equal logits. How
a prompt is cut into chunks depends on when its pictures come, and a prefill apart computes the last token elsewhere;
the bundled model is trained, and its choices are further apart than that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.model_info import BUNDLED
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS, Case, CasesOf, FolderOf
from tests.equality.runs import answer_all
from tests.equality.served import Served, serve
from tests.gpu import fast_path
from tests.gpu.device import DEVICE, needs_gpu
from tools.soak.leak_check import samples

pytestmark = [*needs_gpu, pytest.mark.cluster]
POOLS = {"kv_cache_bytes": 32 * 2**20, "encoder_cache_bytes": 8 * 2**20, "swap_bytes": 0, "memory_fraction": 0.2}


@pytest.mark.parametrize("topology", ["1epd", "1e1pd", "1e1p1d"])
async def test_the_bundled_model_answers_as_in_one_process(topology: str, cases_of: CasesOf, broker_url: str) -> None:
    await check(BUNDLED / "signpost", topology, cases_of("signpost"), MAX_TOKENS["signpost"], broker_url)


async def test_random_weights_answer_as_in_one_process(cases_of: CasesOf, folder_of: FolderOf, broker_url: str) -> None:
    await check(folder_of("qwen2"), "1pd", cases_of("qwen2"), MAX_TOKENS["qwen2"], broker_url)


@pytest.mark.parametrize(("topology", "dtype"), [("1e1pd", "bfloat16"), ("1e1p1d", "float32")])
async def test_keys_and_values_of_cross_attention_that_are_handed_over_answer_as_in_one_process(
    topology: str, dtype: str, cases_of: CasesOf, folder_of: FolderOf, broker_url: str
) -> None:
    """A prefill apart rounds its last token differently: too little in float32 to choose another one."""
    cases, max_tokens = cases_of("bart")[:6], MAX_TOKENS["bart"]
    await check(folder_of("bart"), topology, cases, max_tokens, broker_url, dtype)


async def check(
    folder: Path,
    topology: str,
    cases: list[Case],
    max_tokens: int,
    broker_url: str,
    dtype: str = "bfloat16",
    **pools: Any,
) -> None:
    engine = {"device": DEVICE, "dtype": dtype, **(pools or POOLS), **fast_path.flashinfer_for(dtype)}
    llm = LLM(folder, **engine)
    if dtype != "float32":
        fast_path.check_encoder(llm)
    expected = [answer_all(llm, [case], max_tokens)[0] for case in cases]
    del llm  # its share of the GPU
    with serve(folder, broker_url, f"gpu-{folder.name}-{topology}", topology=topology, **engine) as served:
        async with served.client() as client:
            answers = [await served.answer(client, case, max_tokens) for case in cases]
        assert [answer.token_ids for answer in answers] == expected
        way = "cuda+unix" if DEVICE == "cuda" else "shm+unix"
        assert ways(served) == ({way} if len(served.cluster.instances) > 2 else set())
        await served.wait_until_nothing_is_held()


def ways(served: Served) -> set[str]:
    """The transports by which tensors went from worker to worker."""
    settings, told = served.cluster.supervisor.plan.settings, []
    for instance in served.cluster.instances.values():
        told += samples(instance, settings)
    return {sample.labels["outcome"] for sample in told if sample.name == "triptych_tensors_sent_total"}
