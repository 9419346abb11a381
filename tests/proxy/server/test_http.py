"""The API around the answers: other endpoints, validation, OpenAI's error shape everywhere, limits."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from common.messages import Generate
from tests.proxy.conftest import eventually
from tests.proxy.sample_media import image_part, picture


async def test_models_health_and_readiness(serve):
    async with serve(served_model_name=("signs", "whisper-1")) as rig:
        assert [model.id async for model in await rig.client.models.list()] == ["signs", "whisper-1"]
        assert (await rig.client.models.retrieve("whisper-1")).id == "whisper-1"
        assert (await rig.chat(model="whisper-1")).model == "whisper-1"
        assert (await rig.http.get("/health")).status_code == 200
        await eventually(lambda: rig.service.pool.broker_reachable)
        assert (await rig.http.get("/ready")).status_code == 200
        with pytest.raises(openai.NotFoundError, match="'gpt-4'") as caught:
            await rig.chat(model="gpt-4")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError) as caught:
            await rig.chat(model="x" * 10**6)
        assert len(caught.value.message) < 1000, "it is not sent back whole"


async def test_probes_may_ask_with_head(serve):
    async with serve(encoders=0, decoders=0) as rig:
        for path, status in (("/health", 200), ("/ready", 503), ("/ping", 200)):
            asked, probed = await rig.http.get(path), await rig.http.head(path)
            assert (asked.status_code, probed.status_code, probed.content) == (status, status, b"")
            assert probed.headers["content-type"] == asked.headers["content-type"]


@pytest.mark.parametrize("reachable", [True, False])
async def test_a_gauge_tells_whether_the_broker_answers(serve, monkeypatch, reachable):
    async with serve(encoders=0, decoders=0) as rig:
        monkeypatch.setattr(type(rig.service.pool), "broker_reachable", reachable)
        assert f"\ntriptych_proxy_broker_up {reachable:.1f}\n" in (await rig.http.get("/metrics")).text


async def test_unknown_routes_and_methods_have_openais_shape(rig):
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405)):
        response = await rig.http.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_route_or_method_a_little_off_is_told_what_was_meant(rig):
    for method, path, said in (
        ("POST", "/chat/completions", "no route /chat/completions; did you mean '/v1/chat/completions'?"),
        ("POST", "/nothing/of/the/kind", "no route /nothing/of/the/kind"),
        ("GET", "/v1/completions", "GET is not allowed here: use POST"),
    ):
        response = await rig.http.request(method, path)
        assert response.json()["error"]["message"] == said


def _chat(**fields):
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


BAD_CHATS = (
    (b"{", None),
    (b"[]", None),
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    (_chat(temperature=3), "temperature"),
    (_chat(top_p=-0.1), "top_p"),
    (_chat(max_tokens=0), "max_tokens"),
    (_chat(n=0), "n"),
    (_chat(n=129), "n"),
    (_chat(n=3, best_of=2), "best_of"),
    (_chat(best_of=2, stream=True), "best_of"),
    (_chat(top_logprobs=2), "top_logprobs"),
    (_chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (_chat(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (_chat(prompt_logprobs=-1), "prompt_logprobs"),
    (_chat(presence_penalty=3), "presence_penalty"),
    (_chat(frequency_penalty=-2.5), "frequency_penalty"),
    (_chat(repetition_penalty=0), "repetition_penalty"),
    (_chat(min_p=1.5), "min_p"),
    (_chat(min_tokens=-1), "min_tokens"),
    (_chat(min_tokens=5, max_tokens=4), "min_tokens"),
    (_chat(logit_bias={"5": 101}), "logit_bias"),
    (_chat(logit_bias={"five": 1}), "logit_bias"),
    (_chat(logit_bias={"-5": 1}), "logit_bias"),
    (_chat(allowed_token_ids=[]), "allowed_token_ids"),
    (_chat(allowed_token_ids=[2**40]), "allowed_token_ids[0]"),
    (_chat(bad_words=["x", ""]), "bad_words[1]"),
    (_chat(priority=2**40), "priority"),
    (_chat(use_beam_search=True, temperature=0.5), "temperature"),
    (_chat(use_beam_search=True, top_k=5), "top_k"),
    (_chat(use_beam_search=True, n=3, best_of=2), "best_of"),
    (_chat(use_beam_search=True, logprobs=True), "logprobs"),
    (_chat(length_penalty=0.5), "length_penalty"),
    (_chat(early_stopping=True), "early_stopping"),
    (_chat(tools=[{"type": "function"}]), "tools[0].function"),
    (_chat(response_format={"type": "yaml"}), "response_format.type"),
    (_chat(response_format={"type": "json_schema"}), "response_format"),
    (_chat(guided_json="{"), "guided_json"),
    (_chat(guided_json=5), "guided_json"),
    (_chat(guided_json="[]"), "guided_json"),
    (_chat(guided_choice=[]), "guided_choice"),
    (_chat(guided_regex="a", guided_choice=["a"]), "guided_choice"),
    (_chat(guided_regex="a" * 300_000), "guided_regex"),
    (_chat(structured_outputs={}), "structured_outputs"),
    (_chat(structured_outputs={"regex": "a", "grammar": "b"}), "structured_outputs.grammar"),
    (_chat(structured_outputs={"xml": "a"}), "structured_outputs.xml"),
    (_chat(response_format={"type": "json_object"}, guided_json={}), "guided_json"),
    (_chat(no_such_field=1), "no_such_field"),
    (_chat(stop=["x"] * 17), "stop"),
    (_chat(stop=""), "stop"),
    (_chat(language="en"), "language"),
    (_chat(seed="x"), "seed"),
    (_chat(seed=2**70), "seed"),
    (_chat(top_k=2**70), "top_k"),
    (_chat(stop_token_ids=[5, 2**70]), "stop_token_ids[1]"),
    (_chat(stop_token_ids=[-1]), "stop_token_ids[0]"),
)


async def test_bad_fields_are_named(rig):
    for body, param in BAD_CHATS:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await rig.http.post("/v1/chat/completions", content=content)
        assert (body, response.status_code) == (body, 400)
        error = response.json()["error"]
        assert (body, error["param"]) == (body, param)
        assert error["type"] == "invalid_request_error"
    assert rig.cluster.decoders[0].received == []


async def test_a_compressed_body_is_refused_as_one(rig):
    for coding, body in (("gzip", gzip.compress(json.dumps(_chat()).encode())), ("GZIP", b"{"), ("br", b"{")):
        response = await rig.http.post("/v1/chat/completions", content=body, headers={"Content-Encoding": coding})
        assert response.status_code == 400
        assert f"the Content-Encoding {coding} is not supported" in response.json()["error"]["message"]
    for coding in ("identity", "utf-8"):
        answer = await rig.http.post("/v1/chat/completions", json=_chat(), headers={"Content-Encoding": coding})
        assert answer.status_code == 200


async def test_a_byte_order_mark_before_the_body_is_left_out(rig):
    answer = await rig.http.post("/v1/chat/completions", content=json.dumps(_chat()).encode("utf-8-sig"))
    assert answer.json()["choices"][0]["message"]["content"] == "a red sign"


async def test_unsupported_fields_that_are_switched_off_are_fine(rig):
    answer = await rig.chat(
        logprobs=False,
        response_format={"type": "text"},
        user="somebody",
        tools=[],
        tool_choice="none",
        extra_body={"best_of": None, "n": None, "stream": None, "include_stop_str_in_output": False},
    )
    assert answer.choices[0].finish_reason == "stop"


async def test_a_body_over_the_limit_is_413_with_and_without_a_length(serve):
    async with serve(max_body_bytes=1000) as rig:
        big = json.dumps(_chat(user="x" * 2000)).encode()

        async def chunks():
            yield big[:900]
            yield big[900:]

        for content in (big, chunks()):
            response = await rig.http.post("/v1/chat/completions", content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "item_too_large")


async def test_a_placeholder_smuggled_into_text_is_refused(rig):
    with pytest.raises(openai.BadRequestError, match="placeholders"):
        await rig.chat("<|image_pad|>")
    with pytest.raises(openai.BadRequestError, match="placeholder"):
        await rig.client.completions.create(model=rig.model, prompt="<|image_pad|>")


async def test_completions_of_text_and_of_tokens(rig):
    answer = await rig.client.completions.create(model=rig.model, prompt="red", max_tokens=30)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("a red sign", "stop")
    await rig.client.completions.create(model=rig.model, prompt=[5, 6, 7])
    generate = rig.cluster.decoders[0].of(Generate)[-1]
    assert generate.prompt_token_ids == [5, 6, 7]
    assert generate.request_id.startswith("cmpl-")


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_give_a_choice_each(rig, stream):
    rig.cluster.decoders[0].answer = lambda message: f"sign {message.prompt_token_ids[0]}"
    answer = await rig.client.completions.create(model=rig.model, prompt=[[5], [6], [7]], stream=stream)
    texts = ["", "", ""]
    if stream:
        async for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        texts = [choice.text for choice in answer.choices]
        assert answer.usage.prompt_tokens == 3
    assert texts == ["sign 5", "sign 6", "sign 7"]


BAD_COMPLETIONS = (
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": ["x"] * 10, "n": 128}, "n"),
    ({"prompt": "x", "encoder_prompt": "y"}, "prompt"),
    ({"encoder_prompt": "y"}, "encoder_prompt"),
    ({"prompt": "x", "decoder_prompt": "y"}, "decoder_prompt"),
    ({}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["x", 5]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": "x", "seed": -(2**70)}, "seed"),
    ({"prompt": "x", "top_k": 2**70}, "top_k"),
)


async def test_bad_completions_are_named(rig):
    for fields, param in BAD_COMPLETIONS:
        response = await rig.http.post("/v1/completions", json=fields)
        assert (fields, response.status_code, response.json()["error"]["param"]) == (fields, 400, param)


async def test_metrics_count_what_happened(rig):
    await rig.chat([image_part(picture())])
    await rig.http.post("/v1/completions", content=b"{")
    await rig.http.get("/some/path/of/a/stranger")
    text = (await rig.http.get("/metrics")).text
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[f"triptych_proxy_{name}", tuple(sorted(labels.items()))]

    assert value("requests_total", endpoint="/v1/chat/completions", status="200") == 1
    assert value("requests_total", endpoint="/v1/completions", status="400") == 1
    assert value("requests_total", endpoint="other", status="404") == 1
    assert value("inflight") == value("flights") == 0
    assert value("time_to_first_token_seconds_count") == 1
    assert value("media_bytes_total", kind="image") == len(picture())
    assert value("generation_tokens_total") > 3
    assert value("workers", role="encoder") == 1


def test_the_proxy_never_imports_torch():
    code = (
        "import sys, proxy.app, proxy.routes\n"
        "bad = {'torch', 'transformers', 'engine', 'services'} & {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(', '.join(bad) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


async def test_each_finished_request_is_one_line_of_the_log_without_its_content(serve):
    with capture_logs() as logs:
        async with serve() as rig:
            answer = await rig.chat("a secret")
            [chunk async for chunk in await rig.chat("a secret", stream=True)]
            with pytest.raises(openai.BadRequestError):
                await rig.chat("a secret", max_tokens=0)
            rig.cluster.decoders[0].pause_after = 1
            stream = await rig.chat("a secret", stream=True)
            await anext(aiter(stream))
            await stream.close()
    ended = [entry for entry in logs if entry["event"] == "request ended"]
    assert [entry["outcome"] for entry in ended] == ["ok", "ok", "invalid_request", "client_left"]
    assert ended[0]["request"] == answer.id
    assert (ended[0]["route"], ended[0]["model"]) == ("/v1/chat/completions", "signpost")
    told = answer.usage.prompt_tokens, answer.usage.completion_tokens
    assert [(entry["prompt_tokens"], entry["completion_tokens"]) for entry in ended[:2]] == [told, told]
    assert 0 <= ended[0]["ttft_ms"] <= ended[0]["total_ms"]
    assert ended[2]["ttft_ms"] is None
    walk = [entry["event"] for entry in logs if entry.get("request") == answer.id]
    assert walk == ["request accepted", "job placed", "first token", "request ended"]
    assert "secret" not in str(logs)
