"""`return_token_ids`: the tokens behind the text, exactly as the decoder sent them."""

from __future__ import annotations

import json

import pytest

REQUESTS = {
    "/v1/completions": {"prompt": "red"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", REQUESTS)
async def test_the_tokens_are_told_whole_and_in_pieces_with_the_one_that_ends_them(rig, path):
    sent = [*rig.cluster.text.encode("a red sign", add_special_tokens=False), rig.cluster.info.eos_token_ids[0]]
    body = {**REQUESTS[path], "return_token_ids": True}
    whole = (await rig.http.post(path, json=body)).json()
    assert whole["choices"][0]["token_ids"] == sent
    chunks = _events(await rig.http.post(path, json={**body, "stream": True}))
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == sent


@pytest.mark.parametrize("path", REQUESTS)
async def test_nobody_gets_tokens_who_did_not_ask(rig, path):
    assert "token_ids" not in (await rig.http.post(path, json=REQUESTS[path])).text
    assert "token_ids" not in (await rig.http.post(path, json={**REQUESTS[path], "stream": True})).text


async def test_every_prompt_has_its_own_tokens_and_a_stop_string_hides_none(rig):
    rig.cluster.decoders[0].answer = lambda message: f"sign {message.prompt_token_ids[0]} red"
    body = {"prompt": [[5], [6]], "return_token_ids": True, "stop": " red"}
    choices = (await rig.http.post("/v1/completions", json=body)).json()["choices"]
    for number, choice in zip((5, 6), choices, strict=True):
        said = rig.cluster.text.encode(f"sign {number} red", add_special_tokens=False)
        assert choice["text"] == f"sign {number}"
        assert choice["token_ids"] == said[: len(choice["token_ids"])]
        assert rig.cluster.text.decode(choice["token_ids"]).startswith(f"sign {number} r")


def _events(response):
    lines = (line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]
