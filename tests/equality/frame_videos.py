"""Requests with videos for SmolVLM, and transformers' answers: its own template, sampling, sizes and texts.

Its processors cannot be made without torchvision and num2words: their methods are called on stand-ins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm as processing
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor, get_resize_output_image_size
from transformers.video_utils import VideoMetadata

from tests.equality.cases import Case
from tests.equality.processors import image_processor
from tests.equality.references import Reference
from tests.equality.videos import Clip, clips, part_of
from tests.media_files import encoded
from tests.tiny.llava import LONGEST_EDGE, PIECE_SIDE, VIDEO_SAMPLING
from tests.video_files import all_frames, moving, video_file

FAKE = "<fake_token_around_image>"
NUMBERS = {2: "two", 5: "five", 6: "six"}


def frame_clips() -> list[Clip]:
    """Those of Qwen, and one that is long enough for its ends to be left out."""
    return [*clips(), Clip(video_file(moving(75, 48, 80, seed=4), 5), 5, 75, {})]


def frame_cases(reference: Reference, max_tokens: int) -> list[Case]:
    """One video, one behind a text and before a line break, two, and one between pictures."""
    one, two, three, long = frame_clips()
    pictures = [Image.fromarray(moving(1, *size, seed=9)[0]) for size in ((84, 56), (20, 20))]
    given: list[list[Any]] = [
        [one, "What moves?"],
        ["Look: ", long, "\nAnd now?"],
        [three, "before", two],
        [pictures[0], "and", three, pictures[1], "which?"],
    ]
    return [_case(reference, parts, max_tokens) for parts in given]


def _case(reference: Reference, parts: list[Any], max_tokens: int) -> Case:
    kinds = {Clip: "video", Image.Image: "image", str: "text"}
    media = [part for part in parts if not isinstance(part, str)]
    files = [part.media if isinstance(part, Clip) else encoded(part) for part in media]
    shown = [{"type": kinds[type(part)], **({"text": part} if isinstance(part, str) else {})} for part in parts]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reference.info.folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": shown}],
        chat_template=processing.DEFAULT_CHAT_TEMPLATE,
        tokenize=False,
        add_generation_prompt=True,
    )
    expected = generate(reference, tokenizer, prompt, media, max_tokens)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    return Case(ids, expected, files, http={"messages": [{"role": "user", "content": [*map(part_of, parts)]}]})


@torch.inference_mode()
def generate(reference: Reference, tokenizer: Any, prompt: str, media: list[Any], max_tokens: int) -> list[int]:
    """transformers' answer to a text with `<image>` and `<video>` for pictures and clips."""
    pixels = []
    for item in media:
        text, values = video_of(item) if isinstance(item, Clip) else picture_of(reference, item)
        prompt = prompt.replace("<video>" if isinstance(item, Clip) else "<image>", text.replace("<image>", "<I>"), 1)
        pixels.append(values)
    input_ids = torch.tensor([tokenizer(prompt.replace("<I>", "<image>"), add_special_tokens=False).input_ids])
    options = {"max_new_tokens": max_tokens, "do_sample": False, "attention_mask": torch.ones_like(input_ids)}
    out = reference.model.generate(input_ids=input_ids, pixel_values=torch.cat(pixels)[None], **options)
    return reference.strip(out[0, input_ids.shape[1] :].tolist())


def sampled(clip: Clip) -> VideoMetadata:
    """What the video processor samples of a clip."""
    metadata = VideoMetadata(clip.num_frames, clip.fps, duration=clip.num_frames / clip.fps)
    own = SimpleNamespace(num_frames=VIDEO_SAMPLING["max_frames"], fps=VIDEO_SAMPLING["fps"])
    metadata.frames_indices = SmolVLMVideoProcessor.sample_frames(own, metadata)
    return metadata


def video_of(clip: Clip) -> tuple[str, torch.Tensor]:
    """The text of a clip, and its frames [frames, 3, side, side]."""
    metadata = sampled(clip)
    frames = all_frames(clip.media)[metadata.frames_indices]
    height, width = get_resize_output_image_size(torch.from_numpy(frames).permute(0, 3, 1, 2), LONGEST_EDGE)
    images = [
        Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS).resize((PIECE_SIDE, PIECE_SIDE), 1)
        for frame in frames
    ]
    values = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float()
    tokens = {"fake_image_token": FAKE, "image_token": "<image>"}
    own = SimpleNamespace(image_seq_len=4, global_image_token="<global-img>", **tokens)
    inputs = {"pixel_values": values[None], "video_metadata": [metadata]}
    with mock.patch.object(processing, "num2words", NUMBERS.__getitem__):
        text = processing.SmolVLMProcessor.replace_video_token(own, inputs, 0)
    return text, (values / 255 - 0.5) / 0.5


def picture_of(reference: Reference, image: Image.Image) -> tuple[str, torch.Tensor]:
    """The text of a picture, and its pieces."""
    made = image_processor(reference.info.folder)(images=[[image]], return_tensors="pt", return_row_col_info=True)
    [[rows]], [[columns]] = made["rows"], made["cols"]
    names = FAKE, "<image>", "<global-img>"
    return processing.get_image_prompt_string(rows, columns, 4, *names), made["pixel_values"][0]
