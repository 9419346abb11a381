"""What clients send by default: taken, or refused by a sentence that helps."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from itertools import pairwise

import pytest
from PIL import Image

from common.messages import Generate
from engine.media.image import decode_image
from proxy.api.tokens import DetokenizeRequest, detokenize
from proxy.server.errors import shown
from tests.proxy.sample_media import picture

ACCEPTED = {
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "store": True,
    "service_tier": "auto",
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_options": {"mode": "explicit"},
    "include_reasoning": True,
    "audio": None,
    "detokenize": True,
    "stream_options": {"include_usage": None, "include_obfuscation": False},
    "web_search_options": None,
    "documents": [],
    "mm_processor_kwargs": {},
    "kv_transfer_params": None,
    "cache_salt": None,
    "vllm_xargs": {},
    "chat_template": None,
    "moderation": None,
}
MESSAGES = [{"role": "user", "content": "What does the sign say?"}]


async def test_fields_that_say_nothing_about_the_answer_are_accepted(rig) -> None:
    response = await rig.http.post("/v1/chat/completions", json={"messages": MESSAGES, **ACCEPTED})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_salt": "mine"}, "cache_salt is not supported ('mine' was given): leave it out"),
        ({"web_search_options": {}}, "web_search_options is not supported ({} was given): leave it out"),
        ({"nothing_known": 1}, "nothing_known is not a known field: leave it out"),
        ({"temprature": 1}, "temprature is not a known field: leave it out; did you mean 'temperature'?"),
        ({"stream_options": {"includeusage": True}}, "stream_options.includeusage is not a known field: leave it out"),
        ({"messages": []}, "messages needs at least 1 item, it has 0"),
        ({"messages": [{**MESSAGES[0], "audio": {"id": "x"}}]}, "messages.audio is not supported"),
    ],
)
async def test_a_field_is_refused_by_one_whole_sentence(rig, fields, message) -> None:
    response = await rig.http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


def test_long_values_end_at_a_word_with_an_ellipsis() -> None:
    assert shown([1, 2]) == "[1, 2]"
    text = shown([{"type": "function", "function": {"name": f"tool {number}"}} for number in range(20)])
    assert text.endswith(" …")
    assert len(text) <= 80
    assert shown("x" * 100) == "'" + "x" * 75 + " …"


async def test_an_answer_as_litellm_returns_it_may_be_sent_back(rig) -> None:
    answer = {"role": "assistant", "content": "CAFE", "reasoning_content": "hm"}
    answer["provider_specific_fields"] = {"reasoning": "hm"}
    response = await rig.http.post("/v1/chat/completions", json={"messages": [*MESSAGES, answer, *MESSAGES]})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/moderations", "/v1/images/generations", "/v1/audio/speech"])
async def test_routes_that_are_not_served_say_what_is(rig, path) -> None:
    response = await rig.http.post(path, json={})
    assert response.status_code == 404
    said = response.json()["error"]["message"]
    assert "are not served here, only /v1/chat/completions, /v1/responses, " in said


async def test_max_tokens_beyond_the_context_is_cut(rig) -> None:
    await rig.chat(max_tokens=10**6)
    (generate,) = rig.cluster.decoders[0].of(Generate)
    assert generate.sampling.max_tokens == rig.service.max_model_len - len(generate.prompt_token_ids)


async def test_top_p_of_zero_takes_the_likeliest_token(rig) -> None:
    await rig.chat(top_p=0, temperature=1.5)
    sampling = rig.cluster.decoders[0].of(Generate)[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


async def test_the_stop_string_stays_in_the_text_on_request(rig) -> None:
    whole = (await rig.chat(temperature=0)).choices[0].message.content
    stop = whole.split()[1]
    cut = (await rig.chat(temperature=0, stop=stop)).choices[0]
    kept = (await rig.chat(temperature=0, stop=stop, extra_body={"include_stop_str_in_output": True})).choices[0]
    assert kept.message.content == cut.message.content + stop
    assert (cut.finish_reason, kept.finish_reason) == ("stop", "stop")


async def test_a_prompt_is_shortened_from_the_left(rig) -> None:
    ids = rig.service.text.encode("one two three four five six")
    for keep, kept in ((3, ids[-3:]), (1000, ids), (-1, ids)):
        await rig.client.completions.create(
            model=rig.model, prompt=ids, max_tokens=2, extra_body={"truncate_prompt_tokens": keep}
        )
        assert rig.cluster.decoders[0].of(Generate)[-1].prompt_token_ids == kept
    refused = {"prompt": ids, "truncate_prompt_tokens": 0}
    response = await rig.http.post("/v1/completions", json=refused)
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"
    with_media = [{"type": "image_url", "image_url": _url(picture(), "png")}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": with_media}], "truncate_prompt_tokens": 1}
    response = await rig.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def _url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _encoded(form: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 24), "red").save(file, form)
    return file.getvalue()


@pytest.mark.parametrize("form", ["AVIF", "TIFF"])
async def test_pictures_of_cameras_and_scanners_are_taken(rig, form) -> None:
    data = _encoded(form)
    assert decode_image(data).size == (32, 24)
    answer = await rig.chat(
        [{"type": "image_url", "image_url": {"url": _url(data, form.lower()), "detail": "original"}}]
    )
    assert answer.choices[0].finish_reason == "stop"


async def test_an_image_url_may_be_a_bare_string(rig) -> None:
    answer = await rig.chat([{"type": "image_url", "image_url": _url(picture(), "png")}])
    assert answer.choices[0].finish_reason == "stop"


async def test_an_assistants_turn_may_have_a_refusal(rig) -> None:
    def conversation(part: dict[str, str]) -> dict[str, object]:
        return {"messages": [*MESSAGES, {"role": "assistant", "content": [part]}, *MESSAGES]}

    refused, said = conversation({"type": "refusal", "refusal": "no"}), conversation({"type": "text", "text": "no"})
    answers = [await rig.http.post("/tokenize", json=one) for one in (refused, said)]
    assert answers[0].json()["tokens"] == answers[1].json()["tokens"]
    assert (await rig.http.post("/v1/chat/completions", json=refused)).status_code == 200


async def test_heic_is_refused_by_name(rig) -> None:
    data = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64)
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": _url(data, "heic")}]}]}
    response = await rig.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "HEIC" in response.json()["error"]["message"]


async def test_errors_name_the_setting_that_would_allow_it(serve) -> None:
    async with serve(max_media_bytes=100) as rig:
        for url, setting in (
            ("http://127.0.0.1:1/x.png", "--allow-private-media-urls"),
            ("file:///x.png", "--allowed-media-folder"),
            (_url(_encoded("TIFF"), "tiff"), "--max-media-bytes"),
        ):
            content = [{"type": "image_url", "image_url": {"url": url}}]
            body = {"messages": [{"role": "user", "content": content}]}
            response = await rig.http.post("/v1/chat/completions", json=body)
            assert setting in response.json()["error"]["message"]


async def test_tokens_of_a_text_and_a_conversation_and_back(rig) -> None:
    text = "red signs"
    answer = (await rig.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["tokens"] == rig.service.text.encode(text)
    assert (answer["count"], len(answer["token_strs"])) == (len(answer["tokens"]),) * 2
    assert answer["max_model_len"] == rig.service.max_model_len
    back = (await rig.http.post("/detokenize", json={"model": rig.model, "tokens": answer["tokens"]})).json()
    assert back["prompt"] == text
    chat = (await rig.http.post("/tokenize", json={"messages": MESSAGES})).json()
    await rig.chat(MESSAGES[0]["content"])
    assert chat["tokens"] == rig.cluster.decoders[0].of(Generate)[-1].prompt_token_ids


async def test_other_requests_are_answered_while_many_tokens_become_text(rig, monkeypatch) -> None:
    tokens = rig.service.text.encode("red signs") * 100_000

    async def parsed(*_: object) -> DetokenizeRequest:
        return DetokenizeRequest.model_construct(model=None, tokens=tokens)

    monkeypatch.setattr("proxy.api.tokens.parse", parsed)
    answering = asyncio.ensure_future(anext(detokenize(rig.service, None)))
    turns_s = [time.perf_counter()]
    while not answering.done():
        await asyncio.sleep(0)
        turns_s.append(time.perf_counter())
    assert max(after - before for before, after in pairwise(turns_s)) < 0.5 * (turns_s[-1] - turns_s[0])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x" * 10**6}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenised_is_refused_by_field(rig, path, body, param) -> None:
    response = await rig.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_version_and_ping_answer(rig) -> None:
    assert (await rig.http.get("/version")).json()["version"]
    for method in ("GET", "POST"):
        assert (await rig.http.request(method, "/ping")).status_code == 200


async def test_a_clients_request_id_is_returned_and_an_impossible_one_replaced(rig) -> None:
    for given, taken in (("trace-1/a", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)):
        response = await rig.http.post(
            "/v1/chat/completions", json={"messages": MESSAGES}, headers={"X-Request-Id": given}
        )
        assert (response.headers["x-request-id"] == given) is taken
        assert response.json()["id"].startswith("chatcmpl-")
    wrong = await rig.http.post("/v1/completions", json={}, headers={"X-Request-Id": "mine"})
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (400, "mine")


async def test_an_unexpected_error_tells_the_requests_id_and_that_the_connection_ends(rig, monkeypatch) -> None:
    monkeypatch.setattr(rig.service, "join_line", None)
    response = await rig.http.post("/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert response.headers["connection"] == "close"


async def test_web_pages_of_allowed_origins_may_call_the_api(serve) -> None:
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with serve(allowed_origins=("https://chat.example",), api_key="secret") as rig:
        for origin, allowed in (("https://chat.example", True), ("https://evil.example", False)):
            answer = await rig.http.options("/v1/chat/completions", headers={"Origin": origin, **preflight})
            assert (answer.status_code == 200) is allowed
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
        forgets = {"Origin": "https://chat.example", "Access-Control-Request-Method": "DELETE"}
        assert (await rig.http.options("/v1/responses/resp_1", headers=forgets)).status_code == 200
        refused = await rig.http.get("/v1/models", headers={"Origin": "https://chat.example"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example")


async def test_without_the_setting_no_page_may(rig) -> None:
    answer = await rig.http.get("/v1/models", headers={"Origin": "https://chat.example"})
    assert "access-control-allow-origin" not in answer.headers
