"""Text completion with an encoder-decoder model: the prompt is the encoder's, and travels as an input."""

from __future__ import annotations

import shutil
from itertools import pairwise

import openai
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from common.messages import Encode, Generate
from common.text.prompts import decode_tokens
from tests.proxy.streams import events


async def _generated(rig, **fields):
    response = await rig.http.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    encode = rig.cluster.encoders[0].of(Encode)[-1]
    return rig.cluster.decoders[0].of(Generate)[-1], encode, response.json()


async def test_a_prompt_goes_to_the_encoder_and_the_decoder_begins_by_default(serve, translation_model):
    async with serve(translation_model.folder) as rig:
        generate, encode, answer = await _generated(rig, prompt="the red sign")
        assert encode.kind == "text"
        assert decode_tokens(encode.media) == rig.cluster.text.encode("the red sign")
        assert generate.prompt_token_ids == [2, 0]
        assert [(slot.kind, slot.prompt_index) for slot in generate.inputs] == [("text", None)]
        assert answer["choices"][0]["text"] == "a red sign"
        assert answer["usage"]["prompt_tokens"] == len(decode_tokens(encode.media)) + 2 + 10


@pytest.mark.parametrize("name", ["prompt", "encoder_prompt"])
async def test_prompts_of_both_halves_are_text_or_token_ids(serve, translation_model, name):
    async with serve(translation_model.folder) as rig:
        for decoder_prompt, expected in (([0, 5], [2, 0, 5]), ([2, 5], [2, 5]), (None, [2, 0])):
            fields = {name: [7, 8, 9], "decoder_prompt": decoder_prompt}
            generate, encode, _ = await _generated(rig, **fields)
            assert decode_tokens(encode.media) == [7, 8, 9]
            assert generate.prompt_token_ids == expected
        generate, _, _ = await _generated(rig, **{name: "x", "decoder_prompt": "red"})
        assert generate.prompt_token_ids == [2, *rig.cluster.text.encode("red")]


async def test_without_special_tokens_a_text_of_either_half_is_its_tokens_alone(serve, translation_model, tmp_path):
    folder = shutil.copytree(translation_model.folder, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 9)])
    tokenizer.save(str(folder / "tokenizer.json"))
    async with serve(folder) as rig:
        [sign, red] = [rig.cluster.text.encode(text, add_special_tokens=False) for text in ("the sign", "red")]
        fields = {"prompt": "the sign", "decoder_prompt": "red", "add_special_tokens": False, "echo": True}
        generate, encode, answer = await _generated(rig, **fields)
        assert decode_tokens(encode.media) == sign != rig.cluster.text.encode("the sign")
        assert generate.prompt_token_ids == [2, *red] != [2, *rig.cluster.text.encode("red")]
        assert answer["choices"][0]["text"] == "reda red sign"


async def test_the_checkpoints_rules_of_generation_hold_unless_told_otherwise(serve, translation_model):
    async with serve(translation_model.folder) as rig:
        generate, _, _ = await _generated(rig, prompt="x")
        assert (generate.sampling.no_repeat_ngram_size, generate.sampling.forced_eos_token_id) == (3, 2)
        generate, _, _ = await _generated(rig, prompt="x", no_repeat_ngram_size=2)
        assert generate.sampling.no_repeat_ngram_size == 2


async def test_several_prompts_have_one_decoder_prompt_or_one_each(serve, translation_model):
    async with serve(translation_model.folder) as rig:
        decoder = rig.cluster.decoders[0]
        await _generated(rig, prompt=[[7], [8]], decoder_prompt=[2, 5])
        assert [message.prompt_token_ids for message in decoder.of(Generate)] == [[2, 5]] * 2
        await _generated(rig, prompt=[[7], [8]], decoder_prompt=[[2, 5], [2, 6]], n=2)
        assert sorted(message.prompt_token_ids for message in decoder.of(Generate)[2:]) == [[2, 5], [2, 6]]
        assert len(rig.cluster.encoders[0].of(Encode)) == 4  # n choices share the input


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_come_back_as_they_were_processed(serve, translation_model, stream):
    async with serve(translation_model.folder) as rig:
        decode, ids = rig.cluster.text.decode, rig.cluster.text.encode("red")
        body = {"prompt": ["the sign", [7, 8]], "decoder_prompt": ["red", [0, 5]], "n": 2, "stream": stream}
        response = await rig.http.post("/v1/completions", json={**body, "echo": True, "return_prompts": True})
        chunks = events(response) if stream else [response.json()]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        told = {choice["index"]: choice for choice in choices if "encoder_prompt" in choice}
        expected = (rig.cluster.text.encode("the sign"), [2, *ids]), ([7, 8], [2, 0, 5])
        assert sorted(told) == [0, 2]  # the first choice of each prompt; streams of prompts interleave
        for choice, pair in zip((told[0], told[2]), expected, strict=True):
            for name, token_ids in zip(("encoder_prompt", "decoder_prompt"), pair, strict=True):
                assert choice[f"{name}_token_ids"] == token_ids
                assert choice[name] == decode(token_ids, skip_special_tokens=False)
        texts = ["".join(one["text"] for one in choices if one["index"] == index) for index in range(4)]
        echoes = ["red", decode([2, 0, 5], skip_special_tokens=False)]
        assert texts == [f"{echo}a red sign" for echo in echoes for _ in range(2)]
        alone = {"prompt": "x", "echo": True, "max_tokens": 0, "logprobs": 0}
        [choice] = (await rig.http.post("/v1/completions", json=alone)).json()["choices"]
        assert choice["text"] == decode([2, 0], skip_special_tokens=False)
        assert len(choice["logprobs"]["tokens"]) == 2


@pytest.mark.parametrize("decoder_prompt", [[0, 5], None])
@pytest.mark.parametrize("stream", [False, True])
async def test_each_token_of_an_echoed_prompt_stands_where_it_is_said_to(
    serve, translation_model, decoder_prompt, stream
):
    async with serve(translation_model.folder) as rig:
        body = {"prompt": "x", "decoder_prompt": decoder_prompt, "echo": True, "logprobs": 0, "stream": stream, "n": 2}
        response = await rig.http.post("/v1/completions", json=body)
        chunks = events(response) if stream else [response.json()]
        for index in (0, 1):
            parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            text = "".join(part["text"] for part in parts)
            tokens, offsets = (
                [one for part in parts for one in part["logprobs"][name]] for name in ("tokens", "text_offset")
            )
            assert [text[a:b] for a, b in pairwise(offsets)] == tokens[:-1]
            assert text[offsets[-1] :] == "", "the end of the sequence is no text"


BAD = (
    ({"prompt": []}, "prompt"),
    ({"prompt": [99_999]}, "prompt"),
    ({"encoder_prompt": [99_999]}, "encoder_prompt"),
    ({"prompt": "x", "decoder_prompt": 5}, "decoder_prompt"),
    ({"prompt": "x", "decoder_prompt": [-5]}, "decoder_prompt"),
    ({"prompt": "x", "decoder_prompt": [10**30]}, "decoder_prompt"),
    ({"prompt": [[7], [8]], "decoder_prompt": [[2], [2], [2]]}, "decoder_prompt"),
    ({"prompt": [7] * 65}, "prompt"),
    ({"decoder_prompt": "x"}, "prompt"),
)


async def test_bad_prompts_are_named(serve, translation_model):
    async with serve(translation_model.folder) as rig:
        for fields, param in BAD:
            response = await rig.http.post("/v1/completions", json=fields)
            assert (fields, response.status_code, response.json()["error"]["param"]) == (fields, 400, param)
        with pytest.raises(openai.BadRequestError, match="use /v1/completions"):
            await rig.chat("hello")
        with pytest.raises(openai.BadRequestError, match="does not take audio"):
            await rig.client.audio.transcriptions.create(model=rig.model, file=("x.wav", b"RIFF0000WAVE"))
