"""Videos: `LLM` answers what transformers answers, in pieces or whole, however requests are batched."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from common.errors import TriptychError
from common.media.video_rules import read_rules
from common.media.videos import VideoLimits, cut
from common.sampling_params import SamplingParams
from engine import processors
from engine.llm import LLM
from tests.equality.cases import Case, FolderOf, ReferenceOf
from tests.equality.runs import strip
from tests.equality.videos import FAMILIES, clips, video_cases
from tests.video_files import moving, video_file

MAX_TOKENS = 16
OPTIONS: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 16, "block_size": 4, "encoder_batch_items": 1}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


@pytest.fixture(
    scope="module", params=[FAMILIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])]
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cases(name: str, reference_of: ReferenceOf) -> list[Case]:
    return video_cases(reference_of(name), MAX_TOKENS)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_equal_transformers(name: str, cases: list[Case], folder_of: FolderOf, options: dict[str, Any]) -> None:
    llm = LLM(folder_of(name), **options)
    prompts = [{"prompt_token_ids": case.prompt, "multi_modal_data": _media(llm, case)} for case in cases]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))  # type: ignore[arg-type]
    answers = [strip(llm.info, output.outputs[0].token_ids) for output in outputs]
    assert answers == [case.expected for case in cases]
    llm.decoder.check_integrity()


def _media(llm: LLM, case: Case) -> dict[str, list[bytes]]:
    kinds = [llm.info.placeholders[token] for token in case.prompt if token in llm.info.placeholders]
    return {kind: [media for own, media in zip(kinds, case.media, strict=True) if own == kind] for kind in set(kinds)}


def test_a_video_is_given_as_bytes_a_path_or_frames(name: str, folder_of: FolderOf, tmp_path: Path) -> None:
    """Lossless and sampled before, so that all forms show the same."""
    frames = moving(8, 64, 64)
    media = video_file(frames, 2, codec="png", muxer="mov", pix_fmt="rgb24")
    path = tmp_path / "clip.mov"
    path.write_bytes(media)
    images = [Image.fromarray(frame) for frame in frames]
    llm = LLM(folder_of(name))
    forms: list[Any] = [media, path, str(path), images, frames, (list(frames), 2.0)]
    conversations = [
        [{"role": "user", "content": [{"type": "video", "video": form}, {"type": "text", "text": "What moves?"}]}]
        for form in forms
    ]
    outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    slower = [{"role": "user", "content": [{"type": "video", "video": frames[::-1]}]}]
    [other] = llm.chat(slower, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    assert other.outputs[0].token_ids != outputs[0].outputs[0].token_ids


def test_equal_pieces_are_computed_once_and_their_prefix_is_found(
    name: str, cases: list[Case], folder_of: FolderOf
) -> None:
    llm = LLM(folder_of(name), block_size=4)
    prompt: Any = {"prompt_token_ids": cases[0].prompt, "multi_modal_data": _media(llm, cases[0])}
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    first, again = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_cached_tokens > first.num_prompt_tokens // 2


def test_a_request_stages_few_pieces_at_a_time(
    name: str, cases: list[Case], folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.llm.STAGED_BYTES", 1)
    llm = LLM(folder_of(name))
    request_id = llm.add({"prompt_token_ids": cases[3].prompt, "multi_modal_data": _media(llm, cases[3])}, GREEDY)  # type: ignore[arg-type,typeddict-item]
    live, answer = llm._live[request_id], None
    assert live.unoffered
    while answer is None:
        assert len(live.processed) <= 1
        answer = next(iter(llm.step()), None)
    assert strip(llm.info, answer.outputs[0].token_ids) == cases[3].expected


def test_placeholders_and_media_have_to_agree(name: str, cases: list[Case], folder_of: FolderOf) -> None:
    llm = LLM(folder_of(name))
    picture, video = llm.info.config["image_token_id"], llm.info.config["video_token_id"]
    for prompt, media, message in (
        ([5, video], {}, "1 media placeholders for 0 media items"),
        ([5, picture], {"video": [cases[0].media[0]]}, "0 placeholders of video, for 1|1 placeholders of image, for 0"),
        ([5, video], {"video": [[]]}, "there is one at least"),
        ([5, video], {"video": [b"junk" * 9]}, "no container that can be read"),
    ):
        with pytest.raises(TriptychError, match=message):
            llm.generate({"prompt_token_ids": prompt, "multi_modal_data": media})  # type: ignore[arg-type,typeddict-item]


def test_times_are_written_as_by_transformers(folder_of: FolderOf) -> None:
    """The text of Qwen3-VL's own processor, which needs no decoder for that part."""
    llm, clip = LLM(folder_of("qwen3_vl")), clips()[1]
    grid = torch.tensor([[4, 2, 8]])
    metadata = VideoMetadata(clip.num_frames, clip.fps, frames_indices=[*clip.frames["qwen3"]])
    tokens = {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    own = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2), video_token="<|video_pad|>", **tokens
    )
    own._calculate_timestamps = partial(Qwen3VLProcessor._calculate_timestamps, own)
    inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
    expected = Qwen3VLProcessor.replace_video_token(own, inputs, 0)
    pieces = cut(clip.media, read_rules(llm.info), VideoLimits(), "the video")
    prepare = processors.Preprocessor(llm.info, "float32")
    layouts = [prepare("video", piece).layout for piece in pieces]
    ids = [token for layout in layouts for token, count in layout.expansion for _ in range(count)]
    assert llm.text.decode(ids, skip_special_tokens=False) == expected
