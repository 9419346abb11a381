"""Speech: uploads, languages, long recordings, and chat with a speech model."""

from __future__ import annotations

import dataclasses
import io

import msgspec
import numpy as np
import openai
import pytest
import soundfile

from common.errors import TriptychError
from common.messages import Encode, Generate
from common.text import whisper_prompt
from common.text.processor import TextProcessor
from proxy.media import audio
from proxy.media.helper_process import shared
from tests.media_files import sound_file
from tests.proxy.sample_media import audio_part, speech


def _upload(data: bytes) -> tuple[str, bytes]:
    return "speech.wav", data


async def test_a_short_clip_goes_as_it_is_and_every_format_of_answer_works(speech_rig):
    speech_rig.cluster.decoders[0].answer = lambda message: " well said "
    clip = speech(2.5)
    create = speech_rig.client.audio.transcriptions.create
    answer = await create(model=speech_rig.model, file=_upload(clip), language="en")
    assert answer.text == "well said"
    assert speech_rig.cluster.encoders[0].of(Encode)[0].media == clip
    assert speech_rig.cluster.decoders[0].of(Generate)[0].inputs[0].prompt_index is None
    plain = await create(model=speech_rig.model, file=_upload(clip), language="en", response_format="text")
    assert plain.strip() == "well said"
    verbose = await create(model=speech_rig.model, file=_upload(clip), language="en", response_format="verbose_json")
    assert (verbose.language, verbose.duration, verbose.text) == ("english", 2.5, "well said")
    assert [(s.start, s.end, s.text.strip()) for s in verbose.segments] == [(0, 2.5, "well said")]


async def test_prompts_are_those_of_transformers(speech_rig, whisper_model):
    text, generation = speech_rig.cluster.text, whisper_model.generation
    start = generation["decoder_start_token_id"]
    task, plain = generation["task_to_id"]["transcribe"], generation["no_timestamps_token_id"]
    german = generation["lang_to_id"]["<|de|>"]
    create = speech_rig.client.audio.transcriptions.create
    await create(model=speech_rig.model, file=_upload(speech(1)), language="de")
    await create(model=speech_rig.model, file=_upload(speech(1)), language="de", prompt=" Triptych ")
    await create(model=speech_rig.model, file=_upload(speech(1)))
    told, hinted, detected = speech_rig.cluster.decoders[0].of(Generate)
    assert told.prompt_token_ids == [start, german, task, plain]
    hint = [generation["prev_sot_token_id"], *text.encode(" Triptych", add_special_tokens=False)]
    assert hinted.prompt_token_ids == hint + told.prompt_token_ids
    assert detected.prompt_token_ids == [start]
    languages = tuple(sorted(generation["lang_to_id"].values()))
    assert detected.sampling.prefix_allowed == (languages, (task,), (plain,))
    limit = whisper_model.max_model_len
    assert (told.sampling.max_tokens, detected.sampling.max_tokens) == (limit - 4, limit - 1)
    assert told.sampling.temperature == 0


GIVEN = "<|startofprev|> Triptych<|startoftranscript|><|de|><|translate|>"


async def test_a_decoder_prompt_is_given_whole(speech_rig, whisper_model):
    text, generate = speech_rig.cluster.text, speech_rig.cluster.decoders[0].of
    create, extra = speech_rig.client.audio.translations.create, {"decoder_prompt": GIVEN}
    await create(model=speech_rig.model, file=_upload(speech(1)), extra_body=extra, temperature=0.5)
    assert generate(Generate)[-1].prompt_token_ids == text.encode(GIVEN)
    assert generate(Generate)[-1].sampling.timestamps is not None
    for given in (
        "<|startoftranscript|><|en|><|transcribe|><|notimestamps|> He",
        "<|en|><|transcribe|><|notimestamps|>",
    ):
        ids = [whisper_model.generation["decoder_start_token_id"]] * (given[2:4] == "en") + text.encode(given)
        for prompt in (given, ids):
            extra = {"decoder_prompt": prompt, "return_prompts": True, "return_token_ids": True}
            answer = await speech_rig.chat([audio_part(speech(1))], extra_body=extra)
            told = generate(Generate)[-1]
            assert answer.choices[0].decoder_prompt_token_ids == told.prompt_token_ids == ids
            assert answer.choices[0].decoder_prompt == text.decode(ids, skip_special_tokens=False)
            assert answer.choices[0].encoder_prompt is None
            assert (told.sampling.timestamps, told.sampling.suppress_tokens) == (None, (1, 2))
            assert told.sampling.max_tokens == whisper_model.max_model_len - len(ids)


@pytest.mark.parametrize("response_format", ["json", "verbose_json"])
async def test_a_transcript_tells_its_prompts_on_request(speech_rig, response_format):
    text, create = speech_rig.cluster.text, speech_rig.client.audio.transcriptions.create
    options = {"language": "de", "prompt": "Triptych", "response_format": response_format}
    extra = {"return_prompts": "true"}
    answer = await create(model=speech_rig.model, file=_upload(speech(50)), **options, extra_body=extra)
    told = min(speech_rig.cluster.decoders[0].of(Generate), key=lambda one: one.request_id)
    assert answer.decoder_prompt_token_ids == told.prompt_token_ids
    assert answer.decoder_prompt.startswith("<|startofprev|> Triptych<|startoftranscript|><|de|><|transcribe|>")
    assert text.encode(answer.decoder_prompt) == told.prompt_token_ids
    assert (answer.encoder_prompt, answer.encoder_prompt_token_ids) == (None, None)
    extra |= {"vad_filter": "true"}
    silence = await create(
        model=speech_rig.model,
        file=_upload(sound_file(np.zeros((48_000, 1), np.float32), 16_000)),
        **options,
        extra_body=extra,
    )
    assert silence.text == ""
    assert not hasattr(silence, "decoder_prompt"), "nobody was asked"


async def test_later_windows_share_the_language_and_the_task_of_a_decoder_prompt(speech_rig):
    create, extra = speech_rig.client.audio.translations.create, {"decoder_prompt": GIVEN}
    await create(model=speech_rig.model, file=_upload(speech(50)), extra_body=extra)
    windows = speech_rig.cluster.decoders[0].of(Generate)  # in any order
    first, *later = sorted(windows, key=lambda one: one.request_id)
    assert later
    assert {tuple(one.prompt_token_ids) for one in later} == {tuple(first.prompt_token_ids[-3:])}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("<|startoftranscript|>", "a language as"),
        ("<|startoftranscript|><|transcribe|><|en|>", "a language as"),
        ("<|startoftranscript|><|en|><|notimestamps|>", "a language as"),
        ("Hello<|startoftranscript|><|en|><|transcribe|>", "begins with <|startofprev|>"),
        ("<|startofprev|><|en|><|startoftranscript|><|en|><|transcribe|>", r"the token <\|en\|> is out of place"),
        ("<|startoftranscript|><|en|><|transcribe|><|notimestamps|><|startoftranscript|>", "is out of place"),
        ("<|startoftranscript|><|en|><|transcribe|> Hello", "needs <|notimestamps|>"),
        ([10**6], "a language as"),
        ("<|startofprev|>" + " a" * 60 + "<|startoftranscript|><|en|><|transcribe|>", "has at most 47 tokens"),
        ("<|startoftranscript|><|en|><|transcribe|><|notimestamps|>" + " a" * 90, "shorten `decoder_prompt`"),
    ],
)
def test_a_decoder_prompt_follows_the_models_rules(whisper_model, given, said):
    text = TextProcessor(whisper_model)
    with pytest.raises(TriptychError, match=said.replace("|", r"\|").replace(r"\\|", r"\|")) as error:
        whisper_prompt.build(whisper_model, text, **whisper_prompt.options(whisper_model, text, decoder_prompt=given))
    assert error.value.info.param == "decoder_prompt"


async def test_what_does_not_go_with_a_decoder_prompt_is_named(speech_rig):
    prompt = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    for more, param in (({"language": "en"}, "language"), ({"prompt": "x"}, "prompt")):
        form = {"decoder_prompt": prompt, **more}
        response = await speech_rig.http.post("/v1/audio/transcriptions", data=form, files={"file": _upload(speech(1))})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    form = {"decoder_prompt": prompt}
    response = await speech_rig.http.post("/v1/audio/translations", data=form, files={"file": _upload(speech(1))})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "decoder_prompt")
    unused = {"chat_template_kwargs": {"a": 1}, "add_generation_prompt": False}
    unused |= {"skip_special_tokens": False, "prompt_logprobs": 0}
    for name, value in unused.items():
        with pytest.raises(openai.BadRequestError, match=f"{name} is not available"):
            await speech_rig.chat([audio_part(speech(1))], extra_body={name: value})


async def test_a_recording_may_be_read_by_all_that_draws_tokens_and_keeps_repetition_down(serve, whisper_model):
    """As in vLLM, which takes the same fields."""
    drawing = {"temperature": 0.6, "top_p": 0.9, "top_k": 8, "min_p": 0.05, "seed": 7}
    against_repetition = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    asked = drawing | against_repetition
    async with serve(whisper_model.folder) as rig:
        form = {name: str(value) for name, value in asked.items()} | {"language": "en"}
        response = await rig.http.post("/v1/audio/transcriptions", data=form, files={"file": _upload(speech(1))})
        assert response.status_code == 200
        (told,) = rig.cluster.decoders[0].of(Generate)
        assert {name: getattr(told.sampling, name) for name in asked} == asked


async def test_a_detected_language_is_reported_and_its_tokens_are_not_text(speech_rig, whisper_model):
    generation = whisper_model.generation
    french = generation["lang_to_id"]["<|fr|>"]
    speech_rig.cluster.decoders[0].answer = lambda message: [
        french,
        *(allowed[0] for allowed in message.sampling.prefix_allowed[1:]),
        *speech_rig.cluster.text.encode(" oui", add_special_tokens=False),
    ]
    create = speech_rig.client.audio.transcriptions.create
    answer = await create(model=speech_rig.model, file=_upload(speech(1)), response_format="verbose_json")
    assert (answer.language, answer.text) == ("french", "oui")
    chat = await speech_rig.chat([audio_part(speech(1))], max_tokens=10)
    assert chat.choices[0].message.content == "oui"
    words = speech_rig.cluster.text.encode(" oui", add_special_tokens=False)
    assert chat.usage.completion_tokens == len(words) + 1  # and the end, but not the prefix
    assert speech_rig.cluster.decoders[0].of(Generate)[-1].sampling.max_tokens == 13


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_and_log_probabilities_of_a_chat_are_those_that_count(speech_rig, whisper_model, stream):
    """Not the control tokens of a language that the model has detected: they are none where the request tells it."""
    words = speech_rig.cluster.text.encode(" oui", add_special_tokens=False)
    language = whisper_model.generation["lang_to_id"]["<|fr|>"]
    speech_rig.cluster.decoders[0].answer = lambda message: [
        *([language] if message.sampling.prefix_allowed else []),
        *(allowed[0] for allowed in message.sampling.prefix_allowed[1:]),
        *words,
    ]
    for told in ({}, {"language": "fr"}):
        extra = {"return_token_ids": True, **told}
        answer = await speech_rig.chat([audio_part(speech(1))], logprobs=True, stream=stream, extra_body=extra)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        tokens = [token for choice in choices for token in choice.token_ids]
        assert tokens == [*words, whisper_model.eos_token_ids[0]]
        assert sum(len(choice.logprobs.content) for choice in choices if choice.logprobs) == len(tokens)


async def test_a_long_recording_is_cut_where_it_is_quiet_and_joined_in_order(speech_rig, whisper_model):
    decoder = speech_rig.cluster.decoders[0]
    generation = whisper_model.generation
    german = generation["lang_to_id"]["<|de|>"]

    def answer(message: Generate) -> list[int]:
        part = message.request_id.partition(".")[2]
        words = speech_rig.cluster.text.encode(f" part {part}", add_special_tokens=False)
        forced = [german, *(allowed[0] for allowed in message.sampling.prefix_allowed[1:])]
        return (forced if message.sampling.prefix_allowed else []) + words

    decoder.answer = answer
    create = speech_rig.client.audio.transcriptions.create
    verbose = await create(model=speech_rig.model, file=_upload(speech(70)), response_format="verbose_json")
    assert verbose.text == "part 0 part 1 part 2"
    assert verbose.language == "german"
    assert [s.start for s in verbose.segments] == pytest.approx([0, 26.05, 54.05], abs=0.06)
    assert [s.end for s in verbose.segments] == pytest.approx([26.05, 54.05, 70], abs=0.06)
    assert [bool(m.sampling.prefix_allowed) for m in decoder.of(Generate)] == [True, False, False]
    assert all(german in m.prompt_token_ids for m in decoder.of(Generate)[1:])
    stream = await create(model=speech_rig.model, file=_upload(speech(70)), stream=True, language="en")
    events = [event async for event in stream]
    assert "".join(event.delta for event in events[:-1]) == "part 0 part 1 part 2" == events[-1].text


async def test_a_chat_about_a_long_recording_is_one_choice_with_one_end_and_one_limit(speech_rig):
    """Windows are read in turn where an earlier one may end the answer; a window's own end is none of the answer."""
    decoder, text = speech_rig.cluster.decoders[0], speech_rig.cluster.text
    decoder.answer = lambda message: " one two three"
    words = text.encode(" one two three", add_special_tokens=False)
    of_window = len(words) + 1  # and its end

    async def ask(**fields):
        before = len(decoder.of(Generate))
        answer = await speech_rig.chat([audio_part(speech(70))], extra_body={"language": "en"}, **fields)
        choice = answer.choices[0]
        told = choice.message.content, choice.finish_reason, answer.usage.completion_tokens
        return *told, len(decoder.of(Generate)) - before

    whole = "one two three one two three one two three"
    assert await ask() == (whole, "stop", 3 * of_window, 3)
    assert await ask(max_tokens=3 * of_window) == (whole, "stop", 3 * of_window, 3)
    content, *rest = await ask(stop=["two"])
    assert (content, rest[0], rest[2]) == ("one ", "stop", 1)
    for limit in (2, of_window, of_window + 2):
        content, *rest = await ask(max_tokens=limit)
        assert whole.startswith(content)
        assert rest == ["length", limit, 1 + limit // (of_window + 1)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_with_beams_tells_the_score_and_counts_what_was_heard_as_prompt(speech_rig, monkeypatch, stream):
    decoder, scores = speech_rig.cluster.decoders[0], iter([-0.5, -1.5, -1.0])
    own = decoder.messages

    def scored(message):
        *tokens, last = own(message)
        return [*tokens, msgspec.structs.replace(last, score=next(scores))]

    monkeypatch.setattr(decoder, "messages", scored)
    fields = {"stream_options": {"include_usage": True}} if stream else {}
    beams = {"language": "en", "use_beam_search": True, "best_of": 2}
    answer = await speech_rig.chat([audio_part(speech(70))], extra_body=beams, stream=stream, **fields)
    chunks = [chunk async for chunk in answer] if stream else [answer]
    ends = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert [choice.score for choice in ends] == [-1.0]
    prompts = [len(message.prompt_token_ids) for message in decoder.of(Generate)]
    assert chunks[-1].usage.prompt_tokens == sum(prompts) + 3 * (1500 + 10), "the fake worker adds ten for an item"


BAD_FORMS = (
    ({"language": "klingon"}, 400, "language"),
    ({"language": "deutsch"}, 400, "language"),
    ({"language": "deutsch-DE"}, 400, "language"),
    ({"response_format": "yaml"}, 400, "response_format"),
    ({"timestamp_granularities[]": "segment"}, 400, "timestamp_granularities"),
    ({"include[]": "logprobs", "response_format": "text"}, 400, "include"),
    ({"stream": "true", "response_format": "srt"}, 400, "response_format"),
    ({"use_beam_search": "true", "temperature": "0.5"}, 400, "temperature"),
    ({"use_beam_search": "true", "top_k": "5"}, 400, "top_k"),
    ({"temperature": "hot"}, 400, "temperature[0]"),
    ({"no_speech_threshold": "2"}, 400, "no_speech_threshold"),
    ({"top_p": "-1"}, 400, "top_p"),
    ({"min_p": "nan"}, 400, "min_p"),
    ({"repetition_penalty": "0"}, 400, "repetition_penalty"),
    ({"seed": str(2**70)}, 400, "seed"),
    ({"model": "other"}, 404, "model"),
    ({"chunking_strategy": "none"}, 400, "chunking_strategy.type"),
    ({"chunking_strategy": "{"}, 400, "chunking_strategy"),
    (
        {"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "2"},
        400,
        "chunking_strategy.threshold",
    ),
    ({"chunking_strategy": "auto", "chunking_strategy[type]": "auto"}, 400, "chunking_strategy"),
    ({"timestamp_granularities[]": "word"}, 400, "timestamp_granularities"),
    ({"timestamp_granularities[]": "letter", "response_format": "srt"}, 400, "timestamp_granularities[0]"),
    ({"stream": "true", "response_format": "verbose_json"}, 400, "response_format"),
    ({"prompt": "<|endoftext|>"}, 400, "prompt"),
    ({"language": "en", "language[]": "en"}, 400, "language"),
)
BAD_TYPES = (
    "",
    "application/json",
    "multipart/form-datax; boundary=x",
    "multipart/form-data",
    "multipart/form-data; boundary=x; charset=undefined",
    "multipart/form-data; boundary=x; charset=punycode",  # which takes minutes for a MiB
    "multipart/form-data; boundary=x; charset=utf-7",  # which makes halves of pairs
    "multipart/form-data; boundary=x; charset=no-such-charset",
)


async def test_a_form_that_cannot_be_read_is_400_and_says_why(serve, whisper_model):
    body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n--x--\r\n'
    async with serve(whisper_model.folder) as rig:

        async def post(content_type: str) -> tuple[int, str]:
            headers = {"content-type": content_type}
            response = await rig.http.post("/v1/audio/transcriptions", content=body, headers=headers)
            return response.status_code, response.json()["error"]["message"]

        for content_type in BAD_TYPES:
            status, message = await post(content_type)
            assert (content_type, status) == (content_type, 400)
            assert content_type.rpartition("charset=")[2] in message or "boundary" in message
        for content_type in ('Multipart/Form-Data; boundary="x"; charset="UTF-8"', "multipart/form-data;boundary=x"):
            status, message = await post(content_type)
            assert (status, message.partition(":")[0]) == (400, "the form has no file")


async def test_bad_fields_are_named(speech_rig):
    for form, status, param in BAD_FORMS:
        response = await speech_rig.http.post("/v1/audio/transcriptions", data=form, files={"file": _upload(speech(1))})
        assert (form, response.status_code, response.json()["error"]["param"]) == (form, status, param)


async def test_what_was_meant_or_is_to_be_done_is_told(speech_rig):
    for form, says in (
        ({"languge": "en"}, "languge is not a known field: leave it out; did you mean 'language'?"),
        ({"length_penalty": "6"}, "less than or equal to 5"),
        ({"response_format": "diarized_json"}, "no model here tells speakers apart: use verbose_json"),
    ):
        response = await speech_rig.http.post("/v1/audio/transcriptions", data=form, files={"file": _upload(speech(1))})
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]


async def test_what_is_no_recording_is_400(serve, whisper_model):
    samples, long = np.zeros(31 * 16000, np.float32), io.BytesIO()
    samples[-1] = np.nan
    soundfile.write(long, samples, 16000, format="WAV", subtype="FLOAT")  # the encoder sees what is cut from it, as PCM
    bad = (
        (b"", "empty"),
        (b"hello there", "no known format"),
        (b"RIFF\0\0\0\0WAVEfmt ", "cannot be decoded"),
        (long.getvalue(), "not finite numbers"),
    )
    async with serve(whisper_model.folder) as rig:
        for data, says in bad:
            with pytest.raises(openai.BadRequestError, match=says) as caught:
                await rig.client.audio.transcriptions.create(model=rig.model, file=_upload(data))
            assert caught.value.param == "file"
        missing = await rig.http.post("/v1/audio/transcriptions", data={"model": rig.model})
        assert missing.status_code == 400
        broken = await rig.http.post(
            "/v1/audio/transcriptions", content=b"x", headers={"content-type": "multipart/form-data"}
        )
        assert broken.status_code == 400


async def test_a_model_without_ears_refuses_transcriptions_and_a_speech_model_refuses_text(serve, whisper_model):
    async with serve() as rig:
        with pytest.raises(openai.BadRequestError, match="does not take audio"):
            await rig.client.audio.transcriptions.create(model=rig.model, file=_upload(speech(1)))
    async with serve(whisper_model.folder) as rig:
        with pytest.raises(openai.BadRequestError, match="needs audio"):
            await rig.client.completions.create(model=rig.model, prompt="hello")
        with pytest.raises(openai.BadRequestError, match="one clip"):
            await rig.chat("hello")


def test_windows_cover_a_recording_without_gaps_in_any_container():
    clip = speech(40, rate=8000, channels=2)
    samples, rate = soundfile.read(io.BytesIO(clip), dtype="float32")
    for kind, tolerance in (("WAV", 1e-3), ("FLAC", 1e-3), ("OGG", None), ("MP3", None)):
        out = io.BytesIO()
        soundfile.write(out, samples, rate, format=kind)
        with shared(out.getvalue()) as path:
            windows = audio.split(path, 12.0, "file").windows
            cuts = [audio.cut(path, window, "file") for window in windows]
        assert [w.start for w in windows[1:]] == [w.end for w in windows[:-1]]
        assert windows[0].start == 0
        assert windows[-1].end == pytest.approx(len(samples), abs=3000)
        assert all(7 <= w.end_s - w.start_s <= 12 for w in windows[:-1])
        assert len(windows) >= 4
        parts = [soundfile.read(io.BytesIO(part), dtype="float32")[0] for part in cuts]
        if tolerance is not None:
            np.testing.assert_allclose(np.concatenate(parts), samples.mean(axis=1), atol=tolerance)
        for part, window in zip(parts, windows, strict=True):
            assert abs(len(part) - (window.end - window.start)) < 3000


@pytest.mark.parametrize(
    ("generation", "told"),
    [
        ({"language": "german"}, ("<|de|>", "<|transcribe|>")),
        ({"language": "<|de|>", "task": "translate"}, ("<|de|>", "<|translate|>")),
        ({"forced_decoder_ids": [[1, "<|de|>"], [2, "<|translate|>"]]}, ("<|de|>", "<|translate|>")),
        ({"language": "de", "forced_decoder_ids": [[1, "<|fr|>"], [2, "<|translate|>"]]}, ("<|de|>", "<|transcribe|>")),
    ],
)
def test_language_and_task_of_the_checkpoint_hold_where_nobody_tells_others(whisper_model, generation, told):
    text = TextProcessor(whisper_model)
    id_of = text.tokenizer.token_to_id
    forced = [[place, id_of(token)] for place, token in generation.get("forced_decoder_ids", ())]
    generation = {**whisper_model.generation, **generation, "forced_decoder_ids": forced or None}
    info = dataclasses.replace(whisper_model, generation=generation)
    options = whisper_prompt.options(info, text)
    ids, fields = whisper_prompt.build(info, text, **options)
    assert ids[1:3] == [id_of(token) for token in told]
    assert fields["prefix_allowed"] == ()
    asked = whisper_prompt.options(info, text, language="fr", task="transcribe")
    assert whisper_prompt.build(info, text, **asked)[0][1:3] == [id_of("<|fr|>"), id_of("<|transcribe|>")]


def test_english_only_checkpoints_have_no_language(whisper_model):
    generation = {**whisper_model.generation, "is_multilingual": False}
    english = dataclasses.replace(whisper_model, generation=generation)
    text = TextProcessor(english)
    ids, fields = whisper_prompt.build(english, text, language=None)
    assert ids == [english.generation["decoder_start_token_id"], english.generation["no_timestamps_token_id"]]
    assert fields["prefix_allowed"] == ()
    assert whisper_prompt.build(english, text, language="en")[0] == ids
    assert whisper_prompt.options(english, text, decoder_prompt=ids)["token_ids"] == ids
    with pytest.raises(TriptychError, match="English-only and cannot translate: transcribe, or serve") as caught:
        whisper_prompt.build(english, text, language=None, task="translate")
    assert caught.value.info.param == "model"
    with pytest.raises(TriptychError, match="is out of place"):
        whisper_prompt.options(english, text, decoder_prompt="<|startoftranscript|><|en|><|transcribe|>")
