"""Timestamps of a transcript: what the decoder is asked for, segments, subtitles, and how sure the model is."""

from __future__ import annotations

import math

import msgspec
import pytest

from common.messages import Generate, TokenLogprob
from common.sampling_params import TimestampRules
from common.text.whisper_prompt import LANGUAGE_NAMES, language_code, language_name
from proxy.api.segments import Segment, as_srt, as_vtt, split_at_timestamps
from tests.proxy.sample_media import speech

RULES = TimestampRules(1000, 999)


def _at(seconds: float, first: int = 1000) -> int:
    return first + round(seconds / 0.02)


def _split(*token_ids: int, window: tuple[float, float] = (0.0, 30.0), rules: TimestampRules | None = RULES):
    found = split_at_timestamps(token_ids, rules, window, lambda ids: " ".join(map(str, ids)))
    return [(round(one.start_s, 2), round(one.end_s, 2), one.text) for one in found]


def test_segments_lie_between_pairs_of_timestamps():
    tokens = (_at(0), 1, 2, _at(2.4), _at(2.8), 3, _at(5))
    assert _split(*tokens) == [(0.0, 2.4, "1 2"), (2.8, 5.0, "3")]
    assert _split(*tokens, window=(26.05, 54.0)) == [(26.05, 28.45, "1 2"), (28.85, 31.05, "3")]
    kept = split_at_timestamps(tokens, RULES, (0.0, 30.0), lambda ids: "x" * len(ids))
    assert [one.token_ids for one in kept] == [tokens[:4], tokens[4:]]


def test_what_has_no_timestamp_begins_and_ends_with_the_window():
    assert _split(1, 2, window=(30.0, 42.5)) == [(30.0, 42.5, "1 2")]
    assert _split(1, 2, rules=None) == [(0.0, 30.0, "1 2")]
    assert _split(_at(0), 1, _at(2), _at(2), 2) == [(0.0, 2.0, "1"), (2.0, 30.0, "2")]


def test_timestamps_behind_the_end_of_a_clip_are_its_end_and_empty_segments_are_none():
    assert _split(_at(0), 1, _at(29), window=(0.0, 3.2)) == [(0.0, 3.2, "1")]
    assert _split(_at(0), _at(0), window=(0.0, 3.2)) == []
    assert _split() == []


def test_subtitles_have_their_clocks():
    segments = [Segment(0, 2.4, " Hello --> you.", (), 0), Segment(3599.9996, 3661.5, " Bye.", (), 0)]
    assert as_srt(segments) == (
        "1\n00:00:00,000 --> 00:00:02,400\nHello -> you.\n\n2\n01:00:00,000 --> 01:01:01,500\nBye.\n"
    )
    assert as_vtt(segments) == (
        "WEBVTT\n\n00:00.000 --> 00:02.400\nHello -> you.\n\n01:00:00.000 --> 01:01:01.500\nBye.\n"
    )


def test_languages_go_by_code_and_name():
    assert (language_name("de"), language_name("xx")) == ("german", "xx")
    assert (language_code("German"), language_code(" DE "), language_code("klingon")) == ("de", "de", "klingon")
    assert (language_code("Mandarin"), language_code("castilian"), language_code("Haitian")) == ("zh", "es", "ht")
    assert len(set(LANGUAGE_NAMES.values())) == len(LANGUAGE_NAMES) == 100


@pytest.fixture
def timed(whisper_model):
    """A transcript with two segments as a decoder gives it, behind the forced prefix if there is one."""
    first = whisper_model.generation["no_timestamps_token_id"] + 1

    def of(rig):
        def answer(message: Generate) -> list[int]:
            say = lambda text: rig.cluster.text.encode(text, add_special_tokens=False)  # noqa: E731
            german = whisper_model.generation["lang_to_id"]["<|de|>"]
            forced = [german, *(allowed[0] for allowed in message.sampling.prefix_allowed[1:])]
            prefix = forced if message.sampling.prefix_allowed else []
            times = [_at(seconds, first) for seconds in (0, 1.2, 1.5, 2.5)]
            return [*prefix, times[0], *say(" well"), *times[1:3], *say(" said"), times[3]]

        return answer

    return of


async def _create(rig, **fields):
    return await rig.client.audio.transcriptions.create(model=rig.model, file=("x.wav", speech(2.5)), **fields)


async def test_verbose_json_has_segments_by_timestamps(speech_rig, whisper_model, timed):
    speech_rig.cluster.decoders[0].answer = timed(speech_rig)
    fields = {"response_format": "verbose_json", "timestamp_granularities": ["segment"]}
    answer = await _create(speech_rig, language="German", **fields)
    assert (answer.text, answer.language) == ("well said", "german")
    assert [(one.start, one.end, one.text) for one in answer.segments] == [(0, 1.2, " well"), (1.5, 2.5, " said")]
    (generate,) = speech_rig.cluster.decoders[0].of(Generate)
    generation = whisper_model.generation
    no_timestamps = generation["no_timestamps_token_id"]
    assert generate.sampling.timestamps == TimestampRules(no_timestamps + 1, no_timestamps)
    task = generation["task_to_id"]["transcribe"]
    german = generation["lang_to_id"]["<|de|>"]
    assert generate.prompt_token_ids == [generation["decoder_start_token_id"], german, task]


async def test_a_detected_language_and_timestamps_go_together(speech_rig, timed):
    speech_rig.cluster.decoders[0].answer = timed(speech_rig)
    answer = await _create(speech_rig, response_format="verbose_json")
    assert (answer.text, answer.language) == ("well said", "german")
    assert [one.start for one in answer.segments] == [0, 1.5]
    (generate,) = speech_rig.cluster.decoders[0].of(Generate)
    assert len(generate.sampling.prefix_allowed) == 2


@pytest.mark.parametrize("form", ["srt", "vtt"])
async def test_subtitles_are_plain_text(speech_rig, timed, form):
    speech_rig.cluster.decoders[0].answer = timed(speech_rig)
    answer = await _create(speech_rig, response_format=form, language="de")
    point = "," if form == "srt" else "."
    assert f"00:01{point}500 --> " in answer
    assert answer.rstrip().endswith("said")


@pytest.mark.parametrize("language", ["de", None])
async def test_segments_tell_how_sure_the_model_is(monkeypatch, speech_rig, whisper_model, timed, language):
    """That nobody speaks is the probability of <|nospeech|> behind <|startoftranscript|>."""
    decoder = speech_rig.cluster.decoders[0]
    decoder.answer, own = timed(speech_rig), decoder.messages
    silence = TokenLogprob(5, -3.0, 2, [(whisper_model.generation["no_timestamps_token_id"] - 1, math.log(0.25))])

    def replies(message):
        sent = own(message)
        if message.sampling.prompt_logprobs:
            start = message.prompt_token_ids.index(whisper_model.generation["decoder_start_token_id"])
            known = [None] * (start + 1) + [silence] + [None] * (len(message.prompt_token_ids) - start - 2)
            sent[0] = msgspec.structs.replace(sent[0], prompt_logprobs=known)
        else:
            sent[0] = msgspec.structs.replace(sent[0], logprobs=[silence])
        return sent

    monkeypatch.setattr(decoder, "messages", replies)
    answer = await _create(speech_rig, response_format="verbose_json", **({"language": language} if language else {}))
    (generate,) = decoder.of(Generate)
    prefix = len(generate.sampling.prefix_allowed)
    places = range(prefix, prefix + len(speech_rig.cluster.text.encode(" well said", add_special_tokens=False)) + 5)
    mean = sum(-(place + 1) / 10 for place in places) / len(places)
    for one in answer.segments:
        assert one.no_speech_prob == pytest.approx(0.25)
        assert one.avg_logprob == pytest.approx(mean)
        assert one.compression_ratio > 0


async def test_log_probabilities_of_a_plain_transcript(speech_rig):
    speech_rig.cluster.decoders[0].answer = lambda message: " well said"
    answer = await _create(speech_rig, language="en", include=["logprobs"])
    assert "".join(entry.token for entry in answer.logprobs).startswith(" well said")
    assert answer.logprobs[0].logprob == pytest.approx(-0.1)


async def test_a_translation_is_a_task_of_its_own(speech_rig, whisper_model):
    create = speech_rig.client.audio.translations.create
    answer = await create(model=speech_rig.model, file=("x.wav", speech(1)))
    assert answer.text
    (generate,) = speech_rig.cluster.decoders[0].of(Generate)
    assert generate.request_id.startswith("trsl-")
    assert (whisper_model.generation["task_to_id"]["translate"],) in generate.sampling.prefix_allowed


async def test_beams_of_a_transcript(speech_rig):
    fields = {"use_beam_search": "true", "best_of": "4", "length_penalty": "0.8"}
    await _create(speech_rig, language="en", extra_body=fields)
    sampling = speech_rig.cluster.decoders[0].of(Generate)[-1].sampling
    assert (sampling.n, sampling.beam_width, sampling.length_penalty) == (1, 4, 0.8)


async def test_the_tokens_of_a_transcript_are_told_on_request(speech_rig):
    speech_rig.cluster.decoders[0].answer = lambda message: " well said"
    answer = await _create(speech_rig, language="en", extra_body={"return_token_ids": "true"})
    assert answer.token_ids == speech_rig.cluster.text.encode(" well said", add_special_tokens=False)
