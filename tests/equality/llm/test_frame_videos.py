"""Videos of SmolVLM: `LLM` answers what transformers answers, in pieces or whole, however requests are batched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.errors import TriptychError
from common.media import video_rules, videos
from common.sampling_params import SamplingParams
from engine import processors
from engine.core.encoder_engine import encoder_computations
from engine.llm import LLM
from tests.equality.cases import Case, FolderOf, ReferenceOf
from tests.equality.frame_videos import frame_cases, frame_clips, sampled, video_of
from tests.equality.runs import strip
from tests.video_files import moving, video_file

MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
OPTIONS: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 16, "block_size": 4, "encoder_batch_items": 1}]


@pytest.fixture(scope="module")
def cases(reference_of: ReferenceOf) -> list[Case]:
    return frame_cases(reference_of("smolvlm"), MAX_TOKENS)


def chat_of(case: Case) -> list[dict[str, Any]]:
    """The conversation of a case for `LLM.chat`."""
    [message], files = case.http["messages"], iter(case.media)
    kinds = {"video_url": "video", "image_url": "image"}
    parts = [
        {"type": kinds[part["type"]], kinds[part["type"]]: next(files)} if part["type"] in kinds else part
        for part in message["content"]
    ]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("budget", [1, 8, 4096])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_equal_transformers(
    cases: list[Case], folder_of: FolderOf, options: dict[str, Any], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces of one frame, of two, and of all."""
    monkeypatch.setattr(videos, "PIECE_TOKENS", budget)
    llm = LLM(folder_of("smolvlm"), **options)
    outputs = llm.chat([chat_of(case) for case in cases], GREEDY)
    assert [strip(llm.info, output.outputs[0].token_ids) for output in outputs] == [case.expected for case in cases]
    llm.decoder.check_integrity()


def test_prompts_of_token_ids_and_of_text_ask_the_same(cases: list[Case], folder_of: FolderOf) -> None:
    llm, case = LLM(folder_of("smolvlm")), cases[1]
    media = {"video": case.media}
    text = llm.text.decode(case.prompt, skip_special_tokens=False)
    prompts: list[Any] = [{"prompt_token_ids": case.prompt}, {"prompt": text}]
    for prompt in prompts:
        [output] = llm.generate([{**prompt, "multi_modal_data": media}], GREEDY)
        assert strip(llm.info, output.outputs[0].token_ids) == case.expected


def test_the_answers_differ(cases: list[Case]) -> None:
    assert len({tuple(case.expected) for case in cases}) == len(cases)


def test_pieces_are_encoded_once_and_found_by_content(
    cases: list[Case], folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "PIECE_TOKENS", 8)
    llm, before = LLM(folder_of("smolvlm"), block_size=4), encoder_computations.value
    first, again = (llm.chat([chat_of(cases[0])], GREEDY)[0] for _ in range(2))
    pieces = videos.cut(cases[0].media[0], video_rules.read_rules(llm.info), videos.VideoLimits(), "the video")
    assert encoder_computations.value == before + len(pieces) > before + 2
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_cached_tokens > first.num_prompt_tokens // 2


@pytest.mark.parametrize("budget", [1, 8, 4096])
def test_frames_and_texts_equal_transformers(
    folder_of: FolderOf, reference_of: ReferenceOf, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "PIECE_TOKENS", budget)
    info = reference_of("smolvlm").info
    processors.init_worker(str(info.folder), "float32")
    llm = LLM(folder_of("smolvlm"))
    for clip in frame_clips():
        pieces = videos.cut(clip.media, video_rules.read_rules(info), videos.VideoLimits(), "the video")
        items = [processors.process("video", piece) for piece in pieces]
        text, pixels = video_of(clip)
        assert np.array_equal(np.concatenate([item.arrays["pixel_values"] for item in items]), pixels.numpy())
        ids = [token for item in items for token, count in item.layout.expansion for _ in range(count)]
        written = llm.text.decode(ids, skip_special_tokens=False)
        assert videos.prompt_text(pieces[0]).replace("<image>", written) == text
        numbers = [number for piece in pieces for number in videos.read_piece(piece).frames]
        assert numbers == list(sampled(clip).frames_indices)
        assert [videos.prompt_text(piece) for piece in pieces[1:]] == [""] * (len(pieces) - 1)


def test_placeholders_and_videos_have_to_agree(folder_of: FolderOf) -> None:
    llm, media = LLM(folder_of("smolvlm")), video_file(moving(4, 40, 40), 2)
    for prompt, given, message in (
        ("x", {"video": [media]}, "0 times <video> for 1 videos"),
        ("<video><video>", {"video": [media]}, "2 times <video> for 1 videos"),
        ("<image><video>", {"video": [media]}, "2 media placeholders for 1"),
    ):
        with pytest.raises(TriptychError, match=message):
            llm.generate({"prompt": prompt, "multi_modal_data": given})  # type: ignore[arg-type,typeddict-item]


def test_frames_are_seen_as_they_are_given(folder_of: FolderOf) -> None:
    llm, frames = LLM(folder_of("smolvlm")), moving(6, 40, 40)
    media = video_file(frames, 2, codec="png", muxer="mov", pix_fmt="rgb24")
    chats = [[{"role": "user", "content": [{"type": "video", "video": form}]}] for form in (media, frames, (frames, 2))]
    outputs = llm.chat(chats, GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
