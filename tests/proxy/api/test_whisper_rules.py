"""Whisper's rules against invented text, and parts of a recording without speech."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common.messages import Encode, Generate, TokenLogprob, Tokens
from common.text import whisper_prompt
from common.text.whisper_prompt import language_code
from common.text.whisper_rules import TEMPERATURES, Rules, compression_ratio
from tests.media_files import sound_file
from tests.proxy.sample_media import speech

RATE = 8000


class Said:
    """Answers of a decoder: a text by temperature, with its probability and that of silence."""

    def __init__(self, rig, model, texts: dict[float, str], logprob=-0.1, no_speech: float = -9.0) -> None:
        """`logprob` is one for all, or by temperature."""
        self._texts, self._logprob = texts, logprob
        silence = whisper_prompt.no_speech_token_id(model, rig.cluster.text)
        self._silence = [TokenLogprob(1, -0.5, 1, [(silence, no_speech)])]
        decoder = rig.cluster.decoders[0]
        decoder.answer = lambda message: texts[message.sampling.temperature]
        plain = decoder.messages
        decoder.messages = lambda message: [self._weighed(one, message) for one in plain(message)]

    def _weighed(self, one: Tokens, message: Generate) -> Tokens:
        prompt = self._silence * len(message.prompt_token_ids) if one.prompt_logprobs else []
        logprob = self._logprob[message.sampling.temperature] if isinstance(self._logprob, dict) else self._logprob
        logprobs = [TokenLogprob(token, logprob, 1) for token in one.token_ids]
        return Tokens(
            **{name: getattr(one, name) for name in one.__struct_fields__}
            | {"logprobs": logprobs, "prompt_logprobs": prompt}
        )


async def ask(rig, data: bytes = b"", path: str = "transcriptions", **form: str):
    form = {"language": "en", "response_format": "verbose_json", **form}
    files = {"file": ("speech.wav", data or speech(1))}
    response = await rig.http.post(f"/v1/audio/{path}", data=form, files=files)
    assert response.status_code == 200, response.text
    return response.json() if form["response_format"] == "verbose_json" else response.text


def temperatures(rig) -> list[float]:
    return [message.sampling.temperature for message in rig.cluster.decoders[0].of(Generate)]


async def test_silence_has_no_text(speech_rig, whisper_model):
    Said(speech_rig, whisper_model, {0.0: " you"}, logprob=-1.3, no_speech=math.log(0.937))
    for form in ({}, {"response_format": "text", "stream": "true"}):
        answer = await ask(speech_rig, **form)
        assert "you" not in str(answer)
    verbose = await ask(speech_rig)
    assert (verbose["text"], verbose["segments"], verbose["duration"]) == ("", [], 1.0)
    assert temperatures(speech_rig) == [0.0] * 3
    heard = await ask(speech_rig, no_speech_threshold="0.95", log_prob_threshold="-2")
    assert heard["text"] == "you"


async def test_a_sure_text_is_no_silence(speech_rig, whisper_model):
    Said(speech_rig, whisper_model, {0.0: " yes"}, logprob=-0.2, no_speech=math.log(0.9))
    assert (await ask(speech_rig))["text"] == "yes"
    assert "yes" in await ask(speech_rig, response_format="json", stream="true")


async def test_bad_text_is_read_again_at_the_next_temperature(speech_rig, whisper_model):
    loop = " again and again" * 12
    Said(speech_rig, whisper_model, {0.0: loop, 0.2: loop, 0.4: " well said"})
    answer = await ask(speech_rig)
    assert answer["text"] == "well said"
    assert [segment["temperature"] for segment in answer["segments"]] == [0.4]
    assert temperatures(speech_rig) == [0.0, 0.2, 0.4]
    ids = [message.request_id for message in speech_rig.cluster.decoders[0].of(Generate)]
    assert len(set(ids)) == 3
    assert len(speech_rig.cluster.encoders[0].of(Encode)) == 3


async def test_of_bad_readings_the_likeliest_stands(speech_rig, whisper_model):
    """Drawn at the last temperature, a word of a second is another word."""
    loop = " again and again" * 12
    texts = {0.0: " cancelled", 0.2: loop, **dict.fromkeys(TEMPERATURES[2:], " android")}
    logprobs = {0.0: -1.2, 0.2: -0.3, 0.4: -1.3, 0.6: -1.5, 0.8: -1.3, 1.0: -2.0}
    Said(speech_rig, whisper_model, texts, logprobs)
    answer = await ask(speech_rig)
    assert answer["text"] == "cancelled"
    assert [segment["temperature"] for segment in answer["segments"]] == [0.0]
    assert temperatures(speech_rig) == [*TEMPERATURES]


@pytest.mark.parametrize(
    "form", [{"temperature": "0.6"}, {"stream": "true", "response_format": "json"}, {"log_prob_threshold": "-2"}]
)
async def test_one_reading_where_another_is_not_wanted(speech_rig, whisper_model, form):
    Said(speech_rig, whisper_model, {0.0: " mumble", 0.6: " mumble"}, logprob=-1.5)
    await ask(speech_rig, **form)
    assert temperatures(speech_rig) == [float(form.get("temperature", 0))]


async def test_a_series_of_temperatures_is_the_requests_own(speech_rig, whisper_model):
    Said(speech_rig, whisper_model, {0.0: " mumble", 1.0: " mumble"}, logprob=-1.5)
    form = {"language": "en", "temperature[]": ["0", "1"]}
    response = await speech_rig.http.post(
        "/v1/audio/transcriptions", data=form, files={"file": ("speech.wav", speech(1))}
    )
    assert response.status_code == 200
    assert temperatures(speech_rig) == [0.0, 1.0]


def with_pauses(*seconds: float) -> bytes:
    """Noise like speech and silence in turns, silence first, over a faint hiss."""
    random = np.random.default_rng(0)
    parts = [
        random.normal(0, 0.1 if number % 2 else 0.0002, round(length * RATE)) for number, length in enumerate(seconds)
    ]
    return sound_file(np.concatenate(parts).astype(np.float32)[:, None], RATE, subtype="PCM_16")


async def test_parts_without_speech_are_left_out(speech_rig):
    data = with_pauses(10, 5, 40, 8, 20)
    for form in ({"vad_filter": "true"}, {"chunking_strategy": "auto"}, {"chunking_strategy[type]": "server_vad"}):
        answer = await ask(speech_rig, data, **form)
        assert [round(one["start"]) for one in answer["segments"]] == [10, 55]
        assert [round(one["end"]) for one in answer["segments"]] == [15, 63]
        assert answer["duration"] == 83


async def test_a_recording_without_speech_asks_no_worker(speech_rig):
    for data in (with_pauses(5), sound_file(np.zeros((RATE * 5, 1), np.float32), RATE)):
        answer = await ask(speech_rig, data, vad_filter="true")
        assert (answer["text"], answer["segments"], answer["duration"]) == ("", [], 5.0)
    assert speech_rig.cluster.decoders[0].of(Generate) == []


def test_rules_hold_nothing_unknown_against_a_window():
    rules = Rules()
    assert not rules.is_silence(None, -5.0)
    assert rules.is_silence(0.7, -1.0)
    assert not rules.is_silence(0.7, -0.9)
    assert rules.quality("a text", None) > (True, rules.log_prob_threshold)
    assert compression_ratio("ha " * 100) > 2.4 > compression_ratio("an ordinary sentence")


def test_a_text_that_repeats_itself_is_worse_than_an_unlikely_one():
    rules, repeated = Rules(), "ha " * 100
    readings = [("a text", -0.9), ("a text", -1.01), ("a text", -5.0), (repeated, -0.1), (repeated, -0.2)]
    assert sorted(readings, key=lambda reading: rules.quality(*reading), reverse=True) == readings
    good = [rules.quality(*reading) >= (True, rules.log_prob_threshold) for reading in readings]
    assert good == [True, False, False, False, False]


def test_a_language_may_have_a_region():
    assert [language_code(name) for name in ("de-DE", "DE_at", "German", "zh-Hant-TW", "deutsch")] == [
        *("de", "de", "de", "zh", "deutsch")
    ]
