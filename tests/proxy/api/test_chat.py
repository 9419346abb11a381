"""Chat requests, through the official client, against fake workers."""

from __future__ import annotations

import openai
import pytest

from common.messages import Encode, Generate, Tokens
from tests.proxy.conftest import eventually
from tests.proxy.sample_media import audio_part, image_part, picture
from tests.proxy.streams import events


async def test_text_is_answered_with_usage(rig):
    answer = await rig.chat(max_tokens=20, temperature=0, seed=5, top_p=0.5, extra_body={"top_k": 3})
    assert answer.choices[0].message.content == "a red sign"
    assert answer.choices[0].finish_reason == "stop"
    (generate,) = rig.cluster.decoders[0].of(Generate)
    assert generate.request_id == answer.id
    assert answer.usage.prompt_tokens == len(generate.prompt_token_ids)
    assert answer.usage.completion_tokens == len(rig.cluster.text.encode("a red sign")) + 1
    sampling = generate.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (20, 0, 5)
    assert (sampling.top_p, sampling.top_k) == (0.5, 3)
    await eventually(lambda: rig.service.admission.inflight == 0)


async def test_a_stream_gives_the_same_text_and_its_usage_at_the_end(rig):
    rig.read_one_by_one()
    stream = await rig.chat(stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "a red sign"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens > 3
    assert chunks[-1].choices == []
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 4


async def test_a_stream_is_whole_for_clients_that_take_every_line_end_of_unicode_for_one(rig):
    said = "one\u2028two\x85three\u2029four\r\nfünf"
    rig.cluster.decoders[0].answer = lambda message: said
    body = {"model": rig.service.info.name, "messages": [{"role": "user", "content": "Go on."}], "stream": True}
    chunks = events(await rig.http.post("/v1/chat/completions", json=body))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == said
    answer = await rig.chat()
    assert answer.choices[0].message.content == said


async def test_max_tokens_ends_with_length_and_the_default_is_the_rest_of_the_context(rig):
    cut = await rig.chat(max_completion_tokens=2)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens == 2
    await rig.chat()
    generate = rig.cluster.decoders[0].of(Generate)[-1]
    assert generate.sampling.max_tokens == rig.service.info.max_model_len - len(generate.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_answer_and_aborts(rig, stream):
    decoder = rig.cluster.decoders[0]
    decoder.answer = lambda message: "seven red signs stand here and there"
    ids = rig.cluster.text.encode("seven red signs stand here and there")
    decoder.pause_after = len(ids) - 1
    answer = await rig.chat(stop=["never", "signs st"], stream=stream)
    if stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, finish) == ("seven red ", "stop")
    await eventually(lambda: rig.aborted() == {"pd0"})
    await eventually(lambda: not decoder._running)


async def test_a_stop_string_counts_from_the_first_token_behind_a_prompt_of_text(rig):
    rig.cluster.decoders[0].answer = lambda message: "a red sign"
    answer = await rig.http.post("/v1/completions", json={"prompt": "What do you see? I see", "stop": ["red"]})
    assert answer.json()["choices"][0]["text"].strip() == "a"
    waits = {"prompt": "What do you see? I see", "stop": ["red"], "min_tokens": 9}
    answer = await rig.http.post("/v1/completions", json=waits)
    assert answer.json()["choices"][0]["text"].strip() == "a red sign"


async def test_tokens_behind_a_stop_string_do_not_count_however_many_come_at_once(rig):
    decoder, text = rig.cluster.decoders[0], rig.cluster.text
    ids = text.encode("seven red signs stand here and there", add_special_tokens=False)
    wanted = next(ids[:size] for size in range(len(ids)) if "signs st" in text.decode(ids[:size]))
    decoder.messages = lambda message: [Tokens(message.request_id, 0, ids, "length", done=True, num_prompt_tokens=5)]
    answer = await rig.chat(stop=["signs st"], logprobs=True, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("seven red ", "stop")
    assert (choice.token_ids, answer.usage.completion_tokens) == (wanted, len(wanted))


async def test_pictures_leave_one_placeholder_each_and_go_to_different_encoders(serve):
    async with serve(encoders=2) as rig:
        red, blue = picture("red"), picture("blue")
        answer = await rig.chat([image_part(red), {"type": "text", "text": "and"}, image_part(blue)])
        assert answer.choices[0].message.content == "a red sign"
        (generate,) = rig.cluster.decoders[0].of(Generate)
        placeholder = rig.service.info.placeholder_token_id
        expected = [i for i, token in enumerate(generate.prompt_token_ids) if token == placeholder]
        assert [slot.prompt_index for slot in generate.inputs] == expected
        assert len(expected) == 2
        encodes = [encoder.of(Encode) for encoder in rig.cluster.encoders]
        assert [len(messages) for messages in encodes] == [1, 1]
        by_input = {message.input_id: message for messages in encodes for message in messages}
        assert [by_input[0].media, by_input[1].media] == [red, blue]
        assert [by_input[i].content_hash for i in (0, 1)] == [slot.content_hash for slot in generate.inputs]
        assert by_input[0].destination == "pd0"
        assert answer.usage.prompt_tokens == len(generate.prompt_token_ids) + 20


async def test_the_same_picture_goes_to_the_same_encoder(serve):
    async with serve(encoders=3) as rig:
        for _ in range(4):
            await rig.chat([image_part(picture("green"))])
        assert sorted(len(encoder.of(Encode)) for encoder in rig.cluster.encoders) == [0, 0, 4]
        await rig.chat([image_part(picture("blue")), image_part(picture("blue"))])
        counts = [len(encoder.of(Encode)) for encoder in rig.cluster.encoders]
        assert sorted(counts) in ([0, 2, 4], [0, 0, 6])
        assert rig.count("encoder_affinity_total", outcome="hit") == 6


async def test_the_timeline_has_every_stage(rig):
    answer = await rig.chat([image_part(picture())])

    async def complete() -> bool:
        body = (await rig.http.get(f"/v1/requests/{answer.id}/timeline")).json()
        assert body["request_id"] == answer.id
        return {(span["stage"], span["instance"]) for span in body["spans"]} == {
            ("proxy", "proxy"),
            ("encode", "e0"),
            ("decode", "pd0"),
        }

    await eventually(complete)
    missing = await rig.http.get("/v1/requests/chatcmpl-none/timeline")
    assert missing.status_code == 404


async def test_media_that_the_model_does_not_take_is_refused(serve, text_model):
    async with serve() as rig:
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.chat([audio_part(b"RIFF....WAVE")])
        assert caught.value.param == "messages[0].content[0].input_audio.data"
    async with serve(text_model.folder, encoders=0) as rig:
        with pytest.raises(openai.BadRequestError, match="text only"):
            await rig.chat([image_part(picture())])
        assert (await rig.chat([{"type": "text", "text": "hello"}])).choices[0].message.content == "a red sign"


async def test_a_prompt_over_the_context_length_says_so(serve, text_model):
    async with serve(text_model.folder, encoders=0) as rig:
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.chat("many words " * 100)
        assert caught.value.code == "context_length_exceeded"
        assert "128" in str(caught.value)


@pytest.mark.slow
async def test_bodies_of_millions_of_values_and_conversations_of_thousands_of_turns_are_refused(serve, text_model):
    async with serve(text_model.folder, encoders=0) as rig:
        with pytest.raises(openai.APIStatusError, match="commas, at most 1048576") as large:
            await rig.chat("hello", extra_body={"metadata": [0] * (2**20 + 10)})
        assert large.value.status_code == 413
        turns = [{"role": "user", "content": "hello"}] * (2**14 + 1)
        with pytest.raises(openai.BadRequestError, match="at most 16384 items") as many:
            await rig.client.chat.completions.create(model=rig.model, messages=turns)
        assert many.value.param == "messages"
        with pytest.raises(openai.BadRequestError, match="16385 parts, at most 16384") as parts:
            await rig.chat([{"type": "text", "text": "hello"}] * (2**14 + 1))
        assert parts.value.param == "messages"
        with pytest.raises(openai.BadRequestError) as ids:
            await rig.client.completions.create(model=rig.model, prompt=[10**6] * 1000)
        assert (ids.value.code, ids.value.param) == ("context_length_exceeded", "prompt")


async def test_a_text_far_beyond_the_context_is_refused_by_its_field(serve, text_model):
    async with serve(text_model.folder, encoders=0) as rig:
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.chat("many words " * 2**20)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.client.completions.create(model=rig.model, prompt="many words " * 2**20)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_is_continued_and_comes_back_as_processed(rig, stream):
    messages = [{"role": "user", "content": "Colours?"}, {"role": "assistant", "content": "Red, green"}]
    extra = {"continue_final_message": True, "return_prompts": True, "chat_template_kwargs": {"enable_thinking": False}}
    body = {"messages": messages, "stream": stream, "n": 2, **extra}
    response = await rig.http.post("/v1/chat/completions", json=body)
    chunks = events(response) if stream else [response.json()]
    told = [choice for chunk in chunks for choice in chunk["choices"] if "prompt" in choice]
    (generate,) = rig.cluster.decoders[0].of(Generate)
    assert [(one["index"], one["prompt_token_ids"]) for one in told] == [(0, generate.prompt_token_ids)]
    assert told[0]["prompt"].endswith("Red, green")
    answer = await rig.client.completions.create(model=rig.model, prompt="x", extra_body={"return_prompts": True})
    assert answer.choices[0].prompt_token_ids == rig.cluster.text.encode("x")


async def test_the_name_of_a_speaker_goes_to_the_template(serve, text_model):
    template = "{% for m in messages %}{{ m.role }} {{ m.name }}: {{ m.content }} {% endfor %}"
    messages = [
        {"role": "system", "content": "Be brief.", "name": "rules"},
        {"role": "user", "content": "Hot?", "name": "Ann"},
        {"role": "assistant", "content": "Yes.", "name": "Bob"},
        {"role": "user", "content": "Good."},
    ]
    async with serve(text_model.folder, encoders=0, chat_template=template) as rig:
        tokens = (await rig.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
        told = rig.cluster.text.decode(tokens)
    assert told == "system rules: Be brief. user Ann: Hot? assistant Bob: Yes. user : Good. "


BAD_TEMPLATING = (
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs"),
    ({"decoder_prompt": [1]}, "decoder_prompt"),
)


async def test_bad_options_of_the_template_are_named(rig):
    for fields, param in BAD_TEMPLATING:
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        response = await rig.http.post("/v1/chat/completions", json=body)
        assert (fields, response.status_code, response.json()["error"]["param"]) == (fields, 400, param)
