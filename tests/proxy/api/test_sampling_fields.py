"""What the fields of a request become on their way to the worker."""

from __future__ import annotations

import json
import shutil

import msgspec
import openai
import pytest

from common.errors import ErrorInfo
from common.messages import Generate
from common.sampling_params import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from tests.proxy.sample_media import audio_part, speech

SCHEMA = {"type": "object", "properties": {"colour": {"type": "string"}}}
CLOSED = Grammar("json_schema", json.dumps({"additionalProperties": False, **SCHEMA}))
SETTINGS = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "no_repeat_ngram_size": 3,
    "min_tokens": 2,
    "max_tokens": 9,
    "seed": 7,
    "ignore_eos": True,
    "stop_token_ids": [3, 4],
    "allowed_token_ids": [5, 6],
}


async def _sampling(rig, **fields) -> SamplingParams:
    response = await rig.http.post("/v1/completions", json={"prompt": "x", **fields})
    assert response.status_code == 200, response.text
    return rig.cluster.decoders[0].of(Generate)[-1].sampling


async def test_every_setting_arrives(rig):
    sampling = await _sampling(rig, **SETTINGS, logit_bias={"5": -100, "6": 1.5})
    for name, value in SETTINGS.items():
        assert getattr(sampling, name) == (tuple(value) if isinstance(value, list) else value), name
    assert sampling.logit_bias == {5: -100.0, 6: 1.5}


async def test_what_is_not_given_or_null_is_off(rig):
    plain = await _sampling(rig)
    assert await _sampling(rig, **dict.fromkeys(SETTINGS), n=None, logprobs=None, guided_json=None) == plain
    assert plain == SamplingParams(temperature=1.0, max_tokens=plain.max_tokens)
    assert (await _sampling(rig, top_k=-1)).top_k == 0


async def test_the_priority_arrives(rig):
    await rig.chat(extra_body={"priority": -3})
    await rig.client.completions.create(model=rig.model, prompt="x", extra_body={"priority": 5})
    await rig.chat()
    assert [message.priority for message in rig.cluster.decoders[0].of(Generate)] == [-3, 5, 0]


LONG = "x" * (MAX_GRAMMAR_BYTES + 1)
TOO_MUCH = (
    ({"stop": "x" * 1025}, "stop", "1024"),
    ({"stop": ["x", "x" * 1025]}, "stop[1]", "1024"),
    ({"stop": ["x"] * 17}, "stop", "16"),
    ({"bad_words": ["x" * 1025]}, "bad_words[0]", "1024"),
    ({"bad_words": ["x"] * 257}, "bad_words", "256"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "64"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "1024"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": LONG}}}},
        "response_format",
        str(MAX_GRAMMAR_BYTES),
    ),
    ({"guided_json": {"title": LONG}}, "guided_json", str(MAX_GRAMMAR_BYTES)),
    ({"guided_json": LONG}, "guided_json", str(MAX_GRAMMAR_BYTES)),
    ({"guided_regex": LONG}, "guided_regex", str(MAX_GRAMMAR_BYTES)),
    ({"guided_regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "guided_regex", str(MAX_GRAMMAR_BYTES)),
    ({"guided_json": {"properties": {LONG[:-30]: True}}}, "guided_json", str(MAX_GRAMMAR_BYTES)),  # too long closed
    ({"guided_choice": [LONG]}, "guided_choice", str(MAX_GRAMMAR_BYTES)),
    ({"guided_grammar": LONG}, "guided_grammar", str(MAX_GRAMMAR_BYTES)),
    ({"structured_outputs": {"json": {"title": LONG}}}, "structured_outputs.json", str(MAX_GRAMMAR_BYTES)),
    ({"structured_outputs": {"regex": LONG}}, "structured_outputs.regex", str(MAX_GRAMMAR_BYTES)),
    ({"x" * 200: 1}, "x" * 80, "not a known field"),
)


async def test_too_much_is_refused_with_the_field_and_the_limit(rig):
    for fields, param, limit in TOO_MUCH:
        response = await rig.http.post("/v1/completions", json={"prompt": "x", **fields})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_request", param), error
        assert limit in error["message"]
        assert len(error["message"]) < 300
    assert rig.cluster.decoders[0].of(Generate) == []


async def test_more_allowed_tokens_than_there_are_tokens_are_refused(rig):
    size = rig.cluster.info.vocab_size
    assert len((await _sampling(rig, allowed_token_ids=list(range(size)))).allowed_token_ids) == size
    response = await rig.http.post("/v1/completions", json={"prompt": "x", "allowed_token_ids": [1] * (size + 1)})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "allowed_token_ids")
    assert f"has {size + 1} token ids, the vocabulary has only {size}" in error["message"]


async def test_as_many_and_as_long_stop_strings_as_allowed_arrive(rig):
    for given in ("x" * 1024, ["x" * 1024] * 16):
        assert (await _sampling(rig, stop=given)).stop == ((given,) if isinstance(given, str) else tuple(given))
    assert (await _sampling(rig, stop=[])).stop == ()


async def test_bad_words_become_the_tokens_that_write_them(rig):
    sampling = await _sampling(rig, bad_words=["red", " sign"])
    spellings = ("red", " red", "sign", " sign")
    expected = {tuple(rig.cluster.text.encode(word, add_special_tokens=False)) for word in spellings}
    assert set(sampling.bad_words_ids) == expected


CONSTRAINTS = (
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        CLOSED,
    ),
    ({"guided_json": SCHEMA}, CLOSED),
    ({"guided_json": json.dumps(SCHEMA)}, CLOSED),
    ({"guided_regex": "[ab]+"}, Grammar("regex", "[ab]+")),
    ({"guided_choice": ["yes", "no"]}, Grammar("choice", '["yes", "no"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, CLOSED),
    ({"structured_outputs": {"regex": "a?"}}, Grammar("regex", "a?")),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
    ({"structured_outputs": {"grammar": "start: /a/"}}, Grammar("grammar", "start: /a/")),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ({"response_format": {"type": "text"}}, None),
)


async def test_constraints_of_every_kind_arrive_as_grammars(rig):
    for fields, grammar in CONSTRAINTS:
        assert (await _sampling(rig, **fields)).grammar == grammar, fields


async def test_an_error_of_the_worker_names_the_field_of_the_request(rig):
    decoder = rig.cluster.decoders[0]
    for setting, fields, param in (
        ("grammar", {"guided_regex": "("}, "guided_regex"),
        ("grammar", {"response_format": {"type": "json_object"}}, "response_format"),
        ("bad_words_ids", {"bad_words": ["x"]}, "bad_words"),
        ("beam_width", {"use_beam_search": True, "n": 3}, "n"),
        ("beam_width", {"use_beam_search": True, "best_of": 3}, "best_of"),
        ("logit_bias", {"logit_bias": {"99999999": 1}}, "logit_bias"),
    ):
        decoder.failure = ErrorInfo("invalid_request", "no good", setting)
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.chat(extra_body=fields)
        assert caught.value.param == param


async def test_special_tokens_are_shown_on_request(rig):
    text = rig.cluster.text
    ends = text.tokenizer.id_to_token(rig.cluster.info.eos_token_ids[0])
    decoder = rig.cluster.decoders[0]
    decoder.answer = lambda message: [*text.encode("a", add_special_tokens=False), *rig.cluster.info.eos_token_ids]
    create = rig.client.completions.create
    plain = await create(model=rig.model, prompt="x")
    assert plain.choices[0].text == "a"
    shown = await create(model=rig.model, prompt="x", extra_body={"skip_special_tokens": False})
    assert shown.choices[0].text == f"a{ends}"


async def test_special_tokens_of_prompts_can_be_left_out(monkeypatch, rig):
    text, asked = rig.service.text, []
    own = text.encode
    monkeypatch.setattr(
        text, "encode", lambda prompt, **options: asked.append((prompt, options)) or own(prompt, **options)
    )
    await _sampling(rig)
    await _sampling(rig, add_special_tokens=False)
    assert asked == [("x", {"add_special_tokens": True}), ("x", {"add_special_tokens": False})]


async def test_fields_that_are_not_given_are_those_of_generation_config(serve, text_model, tmp_path):
    folder = shutil.copytree(text_model.folder, tmp_path / "plain")
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, **recommended}))

    async def sampled(rig, **fields):
        sampling = await _sampling(rig, **fields)
        await rig.chat(extra_body=fields)
        assert rig.cluster.decoders[0].of(Generate)[-1].sampling == msgspec.structs.replace(
            sampling, max_tokens=rig.cluster.decoders[0].of(Generate)[-1].sampling.max_tokens
        )
        return {name: getattr(sampling, name) for name in recommended}

    async with serve(folder) as rig:
        assert await sampled(rig) == recommended
        own = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
        assert await sampled(rig, **own) == {**own, "top_k": 0}
        beams = {"use_beam_search": True, "n": 2}
        off = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.05}
        assert await sampled(rig, **beams) == off
    async with serve(folder, generation_config="none") as rig:
        assert await sampled(rig) == {**off, "temperature": 1.0, "repetition_penalty": 1.0}


async def test_the_rules_of_generation_config_hold_for_chats_and_completions(serve, text_model, tmp_path):
    folder = shutil.copytree(text_model.folder, tmp_path / "plain")
    rules = {"no_repeat_ngram_size": 3, "suppress_tokens": [7], "bad_words_ids": [[8, 9]]}
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, **rules}))
    async with serve(folder) as rig:
        completed = await _sampling(rig)
        await rig.chat()
        for sampling in (completed, rig.cluster.decoders[0].of(Generate)[-1].sampling):
            assert (sampling.no_repeat_ngram_size, sampling.suppress_tokens) == (3, (7,))
            assert sampling.bad_words_ids == ((8, 9),)


async def test_a_recording_is_read_as_generation_config_says_at_temperature_0(serve, whisper_model, tmp_path):
    folder = shutil.copytree(whisper_model.folder, tmp_path / "plain")
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, **recommended, "no_repeat_ngram_size": 3}))
    expected = {**recommended, "temperature": 0.0}
    async with serve(folder) as rig:
        sent = rig.cluster.decoders[0].of
        for own in ({}, {"temperature": 0.3, "top_p": 0.8, "top_k": 0, "min_p": 0.2, "repetition_penalty": 1.5}):
            form = {"language": "en", **{name: str(value) for name, value in own.items()}}
            files = {"file": ("clip.wav", speech(1))}
            assert (await rig.http.post("/v1/audio/transcriptions", data=form, files=files)).status_code == 200
            first = sent(Generate)[-1].sampling
            await rig.chat([audio_part(speech(1))], extra_body={"language": "en", **own})
            for told in (first, sent(Generate)[-1].sampling):
                assert {name: getattr(told, name) for name in recommended} == expected | own
                assert told.no_repeat_ngram_size == 3
