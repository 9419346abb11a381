"""When words were spoken: a second request per window, whose prompt is the window's text."""

from __future__ import annotations

import msgspec

from common.messages import Generate, Tokens
from tests.proxy.sample_media import speech


def telling(rig, text: str) -> list[Generate]:
    """Let the decoder say `text`, and a frame every tenth of a second for its tokens. Returns the second requests."""
    decoder, seen = rig.cluster.decoders[0], []
    decoder.answer = lambda message: "" if message.sampling.alignment else text
    plain = decoder.messages

    def messages(message: Generate) -> list[Tokens]:
        found = plain(message)
        wanted = message.sampling.alignment
        if wanted is None:
            return found
        seen.append(message)
        known = [
            one if one is None or place < wanted.first_token else msgspec.structs.replace(one, frame=5 * place)
            for place, one in enumerate(found[0].prompt_logprobs)
        ]
        return [msgspec.structs.replace(found[0], prompt_logprobs=known), *found[1:]]

    decoder.messages = messages
    return seen


async def ask(rig, seconds: float = 1, form: str = "verbose_json", granularities: tuple[str, ...] = ("word",)):
    response = await rig.http.post(
        "/v1/audio/transcriptions",
        data={"language": "en", "response_format": form, "timestamp_granularities[]": list(granularities)},
        files={"file": ("speech.wav", speech(seconds))},
    )
    assert response.status_code == 200, response.text
    return response.json() if form == "verbose_json" else response.text


async def test_words_have_times_and_segments_come_when_asked_for(speech_rig, whisper_model):
    seen = telling(speech_rig, " well said")
    answer = await ask(speech_rig)
    assert [word["word"] for word in answer["words"]] == ["well", "said"]
    assert "segments" not in answer
    (asked,) = seen
    generation, text = whisper_model.generation, speech_rig.cluster.text
    ids = text.encode(" well said", add_special_tokens=False)
    head = [generation["decoder_start_token_id"], generation["lang_to_id"]["<|en|>"]]
    head += [generation["task_to_id"]["transcribe"], generation["no_timestamps_token_id"]]
    assert asked.prompt_token_ids == [*head, *ids, whisper_model.eos_token_ids[0]]
    assert (asked.sampling.alignment.first_token, asked.sampling.alignment.num_frames) == (4, 50)
    assert (asked.sampling.max_tokens, asked.sampling.prompt_logprobs) == (1, 0)
    first, last = answer["words"][0], answer["words"][-1]
    assert (first["start"], last["end"]) == (0.4, round(0.1 * (4 + len(ids)), 3))
    both = await ask(speech_rig, granularities=("word", "segment"))
    assert both["words"] == answer["words"]
    assert [one["text"] for one in both["segments"]] == [" well said"]


async def test_subtitles_word_by_word(speech_rig):
    telling(speech_rig, " well said")
    assert (await ask(speech_rig, form="srt")).startswith("1\n00:00:00,400 --> ")
    assert (await ask(speech_rig, form="vtt")).count("-->") == 2
    assert (await ask(speech_rig, form="srt", granularities=("segment",))).count("-->") == 1


async def test_every_window_has_a_pass_of_its_own_and_times_of_the_recording(speech_rig):
    seen = telling(speech_rig, " well said")
    answer = await ask(speech_rig, seconds=70)
    assert [word["word"] for word in answer["words"]] == ["well", "said"] * 3
    starts = [word["start"] for word in answer["words"]]
    assert starts == sorted(starts)
    assert starts[-1] > 50
    assert len({one.request_id for one in seen}) == 3


async def test_a_window_without_text_needs_no_pass(speech_rig):
    seen = telling(speech_rig, "")
    assert (await ask(speech_rig))["words"] == []
    assert seen == []
