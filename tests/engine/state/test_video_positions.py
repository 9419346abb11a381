"""Positions of videos in a prompt: in pieces as of the whole, with times, and with text between frames."""

from __future__ import annotations

import re
from typing import Any

import pytest

from common.messages import InputLayout, InputSlot, Offer
from common.sampling_params import SamplingParams
from engine.handoff.offer_check import OfferCheck
from engine.state.request import Request, RequestInput

PAD, VIDEO, WIDTH = 9, 8, 4


def offer_of(layout: InputLayout, kind: str = "video") -> Offer:
    rows = layout.num_encoder_tokens
    of_item = f"hash {rows}", kind, [rows, WIDTH], "float32", rows * WIDTH * 4
    return Offer("r", 0, 0, *of_item, layout, "e", 1.0)  # type: ignore[arg-type]


def positions_of(prompt: list[int], layouts: list[InputLayout]) -> tuple[list[list[int]], int]:
    """The positions of the expanded prompt, and the one of the first generated token."""
    places = [index for index, token in enumerate(prompt) if token == VIDEO]
    slots = [InputSlot(number, "video", f"{number}", place) for number, place in enumerate(places)]
    inputs = [RequestInput(slot) for slot in slots]
    request = Request("r", prompt, inputs, sampling=SamplingParams(), arrival=0, uses_mrope=True)
    for item, layout in zip(request.inputs, layouts, strict=True):
        item.offer = offer_of(layout)
    request.expand_prompt()
    assert request.is_prompt_known
    return request.mrope_positions.tolist(), request.mrope_end


def video(num_pairs: int, **fields: Any) -> InputLayout:
    return InputLayout(6 * num_pairs, [(VIDEO, 6 * num_pairs)], (num_pairs, 2, 3), **fields)


def test_pieces_have_the_positions_of_the_whole() -> None:
    times = [0, 4, 9, 13, 18]
    whole = positions_of([1, 2, VIDEO, 3, 4], [video(5, times=times)])
    pieces = [
        video(2, times=times[:2]),
        video(1, times=times[2:3], continues=True),
        video(2, times=times[3:], continues=True),
    ]
    assert positions_of([1, 2, VIDEO, VIDEO, VIDEO, 3, 4], pieces) == whole
    (time, height, width), generated = whole
    assert time[2:32] == [2 + at for at in times for _ in range(6)]
    assert height[2:8] == [2, 2, 2, 3, 3, 3]
    assert width[2:8] == [2, 3, 4, 2, 3, 4]
    assert time[32:] == height[32:] == [5, 6], "text follows height and width"
    assert generated == 21, "what is generated follows the last time"


def test_text_between_frames_counts_by_tokens() -> None:
    expansion = [(5, 1), (5, 1), (VIDEO, 6), (6, 1), (VIDEO, 6)]
    [time, height, width], generated = positions_of([1, VIDEO, 3], [InputLayout(12, expansion, (1, 2, 3))])
    assert time == [0, 1, 2, *[3] * 6, 6, *[7] * 6, 10]
    assert height == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 7, 7, 8, 8, 8, 10]
    assert width == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 7, 8, 9, 10]
    assert generated == 11


@pytest.mark.parametrize(
    ("layout", "kind", "fault"),
    [
        (video(2), "image", "0 placeholders in the expansion"),
        (InputLayout(12, [(PAD, 12)], (2, 2, 3)), "video", "0 placeholders in the expansion"),
        (video(2, times=[0]), "video", "times of 1 pairs"),
        (video(2, times=[4, 0]), "video", "do not rise"),
        (video(2, times=[0, 2**40]), "video", "do not rise"),
        (InputLayout(12, [(VIDEO, 12)], times=[0, 1]), "video", "times without a grid"),
        (InputLayout(12, [(VIDEO, 6), (5, 2), (VIDEO, 6)], (1, 2, 3)), "video", r"a grid of \[1, 2, 3\]"),
        (InputLayout(12, [(VIDEO, 7), (VIDEO, 5)], (1, 2, 3)), "video", r"a grid of \[1, 2, 3\]"),
    ],
)
def test_layouts_that_lie_are_refused(layout: InputLayout, kind: str, fault: str) -> None:
    check = OfferCheck(WIDTH, vocab_size=20, max_rows=50, placeholder=PAD, video_placeholder=VIDEO)
    assert check.fault(offer_of(video(2, times=[0, 3], continues=True))) is None
    found = check.fault(offer_of(layout, kind))
    assert found is not None
    assert re.search(fault, found)
    blind = OfferCheck(WIDTH, vocab_size=20, max_rows=50, placeholder=PAD)
    assert blind.fault(offer_of(video(2))) == "a video, which the model does not take"
