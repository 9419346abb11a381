"""Requests and answers that no connection takes: one request ends with an error that says so, once, and no other does.

The limits are lowered here, so that a few kilobytes are too much; the sockets' own stay what they are.
"""

from __future__ import annotations

import asyncio

import openai
import pytest

from broker.cluster import rpc
from common.messages import Generate, TokenLogprob, Tokens, encode
from proxy.api import logprobs
from proxy.api.logprobs import check_prompt_logprobs, max_prompt_tokens
from tests.proxy.conftest import ProxyHarness, eventually
from tests.proxy.streams import gather

WORDS = "stand here " * 100


async def _bystander(rig: ProxyHarness) -> asyncio.Task:
    """A stream that has begun, and goes on with `resume`."""
    for decoder in rig.cluster.decoders:
        decoder.pause_after = 1
    stream = await rig.chat(stream=True)
    task = asyncio.create_task(gather(stream))
    await eventually(lambda: any(decoder.of(Generate) for decoder in rig.cluster.decoders))
    return task


async def _assert_undisturbed(rig: ProxyHarness, bystander: asyncio.Task) -> None:
    known = {worker.instance_id for worker in rig.service.pool.workers("prefill", "decode", "prefill_decode")}
    assert known == {worker.id for worker in [*rig.cluster.prefills, *rig.cluster.decoders]}
    for decoder in rig.cluster.decoders:
        decoder.resume.set()
    assert await bystander == ({0: "a red sign"}, {0: "stop"})
    assert rig.count("retries_total", reason="decoder_gone") == 0
    await rig.assert_clean()


async def test_a_request_that_is_too_large_for_the_workers_is_the_clients_error_and_sent_to_none(serve, monkeypatch):
    async with serve(decoders=3) as rig:
        bystander = await _bystander(rig)
        asked = sum(len(decoder.of(Generate)) for decoder in rig.cluster.decoders)
        monkeypatch.setattr(rpc, "MAX_TO_WORKER_BYTES", 2000)
        with pytest.raises(
            openai.APIStatusError, match=r"Generate message has .* more than the 2000 allowed"
        ) as caught:
            await rig.chat("x", stop=["s" * 1000] * 3)
        assert (caught.value.status_code, caught.value.code) == (413, "item_too_large")
        assert sum(len(decoder.of(Generate)) for decoder in rig.cluster.decoders) == asked
        monkeypatch.undo()
        await _assert_undisturbed(rig, bystander)


async def test_a_prompt_that_is_too_large_to_be_computed_apart_is_sent_to_nobody(serve, monkeypatch):
    async with serve(decoders=0, pairs=(1, 1)) as rig:
        monkeypatch.setattr(rpc, "MAX_TO_WORKER_BYTES", 2000)
        with pytest.raises(openai.APIStatusError, match="more than the 2000 allowed"):
            await rig.chat("x", stop=["s" * 1000] * 3)
        assert not any(one.of(Generate) for one in [*rig.cluster.prefills, *rig.cluster.decoders])


async def test_an_answer_that_is_too_large_for_the_proxy_ends_its_request_and_is_not_asked_for_again(serve):
    """At the real limit, above which the connection would be closed."""
    async with serve(decoders=2) as rig:
        bystander = await _bystander(rig)
        entry = TokenLogprob(1, -0.5, 1, [(1, -0.5)] * 20)
        many = [entry] * (rpc.MAX_FROM_WORKER_BYTES // len(encode(entry)) + 1)
        for decoder in rig.cluster.decoders:
            decoder.messages = lambda message: [
                Tokens(message.request_id, 0, [5], "stop", done=True, prompt_logprobs=many)
            ]
            decoder.pause_after = None
        with pytest.raises(openai.APIStatusError, match="Tokens message has") as caught:
            await rig.client.completions.create(model=rig.model, prompt="x", extra_body={"prompt_logprobs": 20})
        assert (caught.value.status_code, caught.value.code) == (413, "item_too_large")
        assert sum(len(decoder.of(Generate)) for decoder in rig.cluster.decoders) == 2
        await _assert_undisturbed(rig, bystander)


@pytest.mark.parametrize("late", [False, True], ids=["before the tokens", "after the tokens"])
async def test_log_probabilities_of_a_prompt_computed_apart_that_are_too_large_end_their_request(
    serve, monkeypatch, late
):
    """Also where tokens have come and are held back for them: to compute it all again would be in vain."""
    async with serve(decoders=0, pairs=(2, 1)) as rig:
        monkeypatch.setattr(rpc, "MAX_FROM_WORKER_BYTES", 2000)
        (decoder,) = rig.cluster.decoders
        decoder.pause_after = None if late else 0
        for prefill in rig.cluster.prefills:
            prefill.hold = late
        create = rig.client.completions.create
        asking = asyncio.create_task(
            create(model=rig.model, prompt=WORDS, max_tokens=2, extra_body={"prompt_logprobs": 20})
        )
        await eventually(lambda: len(decoder.of(Generate)) == 1)
        if late:
            await eventually(lambda: not decoder._running)
            for prefill in rig.cluster.prefills:
                prefill.release.set()
        with pytest.raises(openai.APIStatusError, match="Prefilled message has") as caught:
            await asking
        assert (caught.value.status_code, caught.value.code) == (413, "item_too_large")
        assert sum(len(prefill.of(Generate)) for prefill in rig.cluster.prefills) == 1
        assert len(decoder.of(Generate)) == 1
        decoder.resume.set()


@pytest.mark.parametrize("count", [0, 1, 20])
def test_the_log_probabilities_of_the_longest_allowed_prompt_fit_into_a_message(count):
    largest = TokenLogprob(2**31, -0.1, 2**31, [(2**31, -0.1)] * count)
    most = max_prompt_tokens(count)
    assert len(encode(Tokens("r", 0, [1], prompt_logprobs=[largest] * most))) <= rpc.MAX_FROM_WORKER_BYTES
    check_prompt_logprobs(count, most)


@pytest.mark.parametrize(
    ("path", "prompt", "fields", "param"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": WORDS}]},
            {"prompt_logprobs": 20},
            "prompt_logprobs",
        ),
        ("completions", {"prompt": WORDS}, {"prompt_logprobs": 20}, "prompt_logprobs"),
        ("completions", {"prompt": WORDS}, {"logprobs": 20, "echo": True}, "logprobs"),
    ],
)
async def test_more_prompt_logprobs_than_a_message_holds_are_refused_at_once(
    monkeypatch, rig, path, prompt, fields, param
):
    assert (await rig.http.post(f"/v1/{path}", json={**prompt, **fields, "max_tokens": 1})).status_code == 200
    room = 50 * len(encode(TokenLogprob(2**31, -0.1, 2**31, [(2**31, -0.1)] * 20)))
    monkeypatch.setattr(logprobs, "MAX_FROM_WORKER_BYTES", logprobs._REST_BYTES + room)
    response = await rig.http.post(f"/v1/{path}", json={**prompt, **fields, "max_tokens": 1})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert f"{param} is 20 for" in error["message"]
    assert "at most 50 are allowed" in error["message"]
    assert (await rig.http.post(f"/v1/{path}", json={**prompt, "max_tokens": 1})).status_code == 200
