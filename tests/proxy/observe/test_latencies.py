"""The histograms of the proxy tell what clients wait for."""

from __future__ import annotations

import openai
import pytest

from common.errors import ErrorInfo
from common.messages import Generate
from tests.proxy.conftest import eventually
from tests.proxy.sample_media import image_part, picture, speech

HISTOGRAMS = ("time_to_first_token_seconds_count", "request_latency_seconds_count")


async def test_a_request_is_one_in_the_histograms_however_many_jobs_it_has(speech_rig, rig):
    recording = "speech.wav", speech(100)
    await speech_rig.client.audio.transcriptions.create(model=speech_rig.model, file=recording)
    assert len(speech_rig.cluster.decoders[0].of(Generate)) > 2
    await rig.client.completions.create(model=rig.model, prompt=["one", "two", "three"])
    for one in (speech_rig, rig):
        await eventually(lambda one=one: one.service.admission.inflight == 0)
        assert [one.count(name) for name in HISTOGRAMS] == [1, 1]


async def test_a_request_that_fails_before_its_first_token_has_no_latency(rig):
    rig.cluster.encoders[0].script = lambda message: ErrorInfo("bad_media", "no picture")
    with pytest.raises(openai.BadRequestError):
        await rig.chat([image_part(picture())])
    assert [rig.count(name) for name in HISTOGRAMS] == [0, 0]
