"""LoRA adapters in real clusters: any mix of requests with and without equals merged weights, token for token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest

from tests.equality.adapters import make_adapters, mixed_cases
from tests.equality.cases import MAX_TOKENS, Case, FolderOf, ReferenceOf
from tests.equality.runs import expected_of
from tests.equality.served import Served, serve

pytestmark = pytest.mark.cluster
KINDS = ("whole", "scaled", "inner")
SETUPS = {"1e1p1d": "qwen2_5_vl", "1p1d": "llama", "2pd": "llama"}


@dataclass(frozen=True)
class Adapted:
    topology: str
    name: str
    cases: list[Case]
    served: Served


@pytest.fixture(scope="module", params=SETUPS)
def adapted(
    request: pytest.FixtureRequest,
    folder_of: FolderOf,
    reference_of: ReferenceOf,
    broker_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Adapted]:
    """Three adapters and places for two: they take turns on each worker."""
    topology, name = request.param, SETUPS[request.param]
    adapters = make_adapters(reference_of(name), tmp_path_factory.mktemp(f"adapters-{topology}"), KINDS)
    cases = mixed_cases(name, reference_of(name), adapters)
    options = {"kv_cache_bytes": 32 * 2**20, "encoder_cache_bytes": 8 * 2**20, "max_num_batched_tokens": 64}
    spread = {"topology": topology, "lora_modules": adapters}
    with serve(folder_of(name), broker_url, f"lora-{topology}", **spread, **options, max_loras=2) as cluster:  # type: ignore[arg-type]
        yield Adapted(topology, name, cases, cluster)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["at once", "staggered"])
async def test_answers_equal_merged_weights(adapted: Adapted, one_by_one: bool) -> None:
    served = adapted.served
    answers = await served.answer_all(adapted.cases, MAX_TOKENS[adapted.name], one_by_one=one_by_one)
    assert [answer.token_ids for answer in answers] == expected_of(adapted.cases)
    await served.wait_until_nothing_is_held()
    if "1p1d" in adapted.topology:  # of two workers, each may keep its adapters
        assert served.total("prefill", "adapter_evictions_total") > 0
        assert served.total("decode", "adapter_evictions_total") > 0


async def test_encoders_compute_each_picture_once_whatever_the_adapter(adapted: Adapted) -> None:
    if not any(case.media for case in adapted.cases):
        pytest.skip("no media")
    await adapted.served.answer_all(adapted.cases, 1)
    pictures = {item for case in adapted.cases for item in case.media}
    assert adapted.served.total("encoder", "encoder_computations") == len(pictures)


async def test_models_are_listed_with_their_parent_and_unknown_ones_refused(adapted: Adapted) -> None:
    served = adapted.served
    base = served.info.name
    async with served.client() as client:
        listed = {model.id: model.model_extra.get("parent") async for model in client.models.list()}  # type: ignore[union-attr]
        assert listed == {base: None, **{f"{base}:{kind}": base for kind in KINDS}}
        with pytest.raises(openai.NotFoundError, match=f"'{base}:whole'"):
            await client.completions.create(model=f"{base}:other", prompt="a", max_tokens=1)


async def test_a_killed_decoder_changes_no_token_of_an_adapter(adapted: Adapted) -> None:
    """The stream goes on from the other worker, which may have to load the adapter first."""
    if adapted.topology != "2pd":
        pytest.skip("one of each")
    served, model = adapted.served, f"{adapted.served.info.name}:whole"
    extra = {"ignore_eos": True, "return_token_ids": True}
    fields = {"model": model, "prompt": "It was a dark", "max_tokens": 300, "temperature": 0, "extra_body": extra}
    async with served.client() as client:
        undisturbed = (await client.completions.create(**fields)).choices[0].token_ids
        told: list[int] = []
        victim = ""
        async for chunk in await client.completions.create(**fields, stream=True):
            told += [token for choice in chunk.choices for token in choice.token_ids]
            assert chunk.model == model
            if not victim and len(told) >= 3:
                victim = await asyncio.to_thread(_kill_the_busy_one, served)
    assert victim
    assert told == undisturbed


def _kill_the_busy_one(served: Served) -> str:
    for name in ("pd0", "pd1"):
        child = served.cluster.instances[name].child
        if served.gauges(name)["requests_outstanding"]:
            assert child is not None
            os.kill(child.pid, signal.SIGKILL)
            return name
    raise AssertionError("no worker has work any more: generate more tokens")
