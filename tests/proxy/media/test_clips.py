"""Clips in a conversation with a model that hears and answers, rather than writing down what was said."""

from __future__ import annotations

import base64

import openai
import pytest

from common.messages import Encode, Generate
from tests.proxy.sample_media import audio_part, data_url, image_part, picture, speech


async def test_clips_leave_one_placeholder_each_in_order(serve, listening_model):
    async with serve(listening_model.folder) as rig:
        first, second = speech(0.2), speech(0.3)
        url_part = {"type": "audio_url", "audio_url": {"url": data_url(second, "audio/wav")}}
        await rig.chat([audio_part(first), {"type": "text", "text": "and"}, url_part], n=2)
        (generate,) = rig.cluster.decoders[0].of(Generate)
        placeholder = rig.service.info.placeholder_token_id
        expected = [i for i, token in enumerate(generate.prompt_token_ids) if token == placeholder]
        assert [slot.prompt_index for slot in generate.inputs] == expected
        assert len(expected) == 2
        media = {message.input_id: message.media for message in rig.cluster.encoders[0].of(Encode)}
        assert media == {0: first, 1: second}
        assert all(slot.kind == "audio" for slot in generate.inputs)


async def test_text_alone_is_answered_too(serve, listening_model):
    async with serve(listening_model.folder) as rig:
        assert (await rig.chat("hello")).choices[0].message.content == "a red sign"


async def test_what_is_no_clip_is_named(serve, listening_model):
    async with serve(listening_model.folder) as rig:
        not_audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(picture()).decode()}}
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.chat([not_audio])
        assert caught.value.param == "messages[0].content[0].input_audio.data"
        with pytest.raises(openai.BadRequestError, match="audio input only"):
            await rig.chat([image_part(picture())])
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.chat([{"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}])
        assert caught.value.param == "messages[0].content[0].audio_url.url"
        with pytest.raises(openai.BadRequestError, match="no speech model"):
            await rig.client.audio.transcriptions.create(model=rig.model, file=("x.wav", speech(0.1)))
