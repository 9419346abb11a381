"""Requests with videos, and transformers' answers: the whole video decoded, then sampled, scaled and cut as written."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.model_info import ModelInfo
from common.text.processor import TextProcessor
from tests.equality.cases import Case
from tests.equality.references import Reference
from tests.media_files import encoded
from tests.video_files import all_frames, moving, video_file

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@dataclass(frozen=True)
class Clip:
    """A video with the frames that the model's processor samples at two per second, computed by hand."""

    media: bytes
    fps: float
    num_frames: int
    frames: dict[str, list[int]]


def clips() -> list[Clip]:
    """Five seconds in H.264 with B frames; 3.7 s of another size in MPEG-4; a second, which both sample to four."""
    long = video_file(moving(50), 10, codec="libx264", bf=2, g=12)
    wide = video_file(moving(37, 224, 96, seed=3), 10)
    short = video_file(moving(5, 64, 64, seed=5), 5)
    return [
        Clip(long, 10, 50, {"qwen2": [0, 5, 10, 15, 20, 25, 30, 35, 40, 45], "qwen3": _spread(50, 10)}),
        Clip(wide, 10, 37, {"qwen2": [0, 6, 12, 18, 24, 30], "qwen3": _spread(37, 7)}),
        Clip(short, 5, 5, {"qwen2": [0, 1, 2, 3], "qwen3": [0, 1, 3, 4]}),
    ]


def _spread(num_frames: int, count: int) -> list[int]:
    return [round(number) for number in np.linspace(0, num_frames - 1, count).tolist()]


def video_cases(reference: Reference, max_tokens: int) -> list[Case]:
    """A case per clip, then both of the first two, then one beside a picture."""
    one, two, three = clips()
    picture = Image.fromarray(moving(1, 84, 56, seed=9)[0])
    given: list[list[Any]] = [
        ["What moves? ", one],
        [two, "And now?"],
        ["Look! ", three, " Describe."],
        [one, "before", two, "after"],
        [picture, "and", two],
    ]
    return [_case(reference, parts, max_tokens) for parts in given]


def _case(reference: Reference, parts: list[Any], max_tokens: int) -> Case:
    text = TextProcessor(reference.info)
    kinds = {Clip: "video", Image.Image: "image", str: "text"}
    shown = [{"type": kinds[type(part)], **({"text": part} if isinstance(part, str) else {})} for part in parts]
    prompt = text.render_chat([{"role": "user", "content": shown}])
    media = [part for part in parts if not isinstance(part, str)]
    files = [part.media if isinstance(part, Clip) else encoded(part) for part in media]
    content = [part_of(part) for part in parts]
    expected = generate(reference, text, prompt, media, max_tokens)
    http = {"messages": [{"role": "user", "content": content}]}
    return Case(prompt, expected, files, http=http)


def part_of(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = "video" if isinstance(part, Clip) else "image"
    data = base64.b64encode(part.media if kind == "video" else encoded(part)).decode()
    mime = "video/mp4" if kind == "video" else "image/png"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{mime};base64,{data}"}}


@torch.inference_mode()
def generate(
    reference: Reference, text: TextProcessor, prompt: list[int], media: list[Any], max_tokens: int
) -> list[int]:
    """transformers' answer to a prompt with one placeholder per clip and picture."""
    info, pixels = reference.info, dict[str, list[Any]]()
    expanded, remaining = list[int](), iter(media)
    video, picture = info.config["video_token_id"], info.config["image_token_id"]
    for token in prompt:
        if token not in (video, picture):
            expanded.append(token)
            continue
        item = next(remaining)
        made = _video(info, item) if isinstance(item, Clip) else _picture(reference, item)
        for name, value in made.items():
            pixels.setdefault(name, []).append(value)
        grid = made["video_grid_thw" if isinstance(item, Clip) else "image_grid_thw"]
        num_tokens = int(grid.prod()) // 4
        if isinstance(item, Clip) and info.family.name == "qwen3_vl":
            expanded += _with_times(info, text, item, int(grid[0]), num_tokens)
        else:
            expanded += [token] * num_tokens
    input_ids = torch.tensor([expanded])
    kinds = input_ids.eq(picture).long() + 2 * input_ids.eq(video).long()
    inputs = {name: torch.stack(many) if many[0].ndim < 2 else torch.cat(many) for name, many in pixels.items()}
    out = reference.model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        mm_token_type_ids=kinds,
        max_new_tokens=max_tokens,
        do_sample=False,
        **inputs,
    )
    return reference.strip(out[0, len(expanded) :].tolist())


def _with_times(info: ModelInfo, text: TextProcessor, clip: Clip, num_pairs: int, num_tokens: int) -> list[int]:
    """As transformers' processor of Qwen3-VL writes a video: the mean time of each pair, then its tokens."""
    begin, end = info.config["vision_start_token_id"], info.config["vision_end_token_id"]
    frames = clip.frames["qwen3"] + clip.frames["qwen3"][-1:] * (len(clip.frames["qwen3"]) % 2)
    tokens: list[int] = []
    for pair in range(num_pairs):
        seconds = (frames[2 * pair] / clip.fps + frames[2 * pair + 1] / clip.fps) / 2
        tokens += text.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)
        tokens += [begin, *[info.config["video_token_id"]] * (num_tokens // num_pairs), end]
    return tokens


def _picture(reference: Reference, image: Image.Image) -> dict[str, torch.Tensor]:
    made = reference._expand([reference.info.placeholder_token_id or 0], [image])
    return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"][0]}


def _video(info: ModelInfo, clip: Clip) -> dict[str, torch.Tensor]:
    """The patches of a clip: all frames in memory, [pairs, 2, 3, height, width], then transformers' permutation."""
    third = info.family.name == "qwen3_vl"
    numbers = clip.frames["qwen3" if third else "qwen2"]
    patch, mean, std = (16, [0.5] * 3, [0.5] * 3) if third else (14, _MEAN, _STD)
    frames = all_frames(clip.media)[numbers]
    width, height = _scaled(frames.shape[2], frames.shape[1], len(numbers), third=third)
    images = [Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
    values = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float() / 255
    values = (values - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    if len(values) % 2:
        values = torch.cat((values, values[-1:]))
    rows, columns, pairs = height // patch, width // patch, len(values) // 2
    cut = values.view(pairs, 2, 3, rows // 2, 2, patch, columns // 2, 2, patch).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    made = {
        "pixel_values_videos": cut.reshape(pairs * rows * columns, 3 * 2 * patch**2),
        "video_grid_thw": torch.tensor([pairs, rows, columns]),
    }
    if info.family.name == "qwen2_5_vl":
        made["second_per_grid_ts"] = torch.tensor(2 / (len(numbers) / clip.num_frames * clip.fps))
    return made


_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def _scaled(width: int, height: int, num_frames: int, *, third: bool) -> tuple[int, int]:
    """The sizes of the clips above under the tiny models' limits, worked out by hand."""
    return {
        (160, 120, False): (168, 112),
        (224, 96, False): (224, 84),
        (64, 64, False): (56, 56),
        (160, 120, True): (64, 32),
        (224, 96, True): (128, 32),
        (64, 64, True): (64, 64),
    }[width, height, third]
