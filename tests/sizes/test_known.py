"""The comparison with what transformers answers in float32."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.equality.cases import Case
from tests.sizes.known import Known, begun

EXPECTED, OTHER = [1, 2, 3], 5
CASES = [Case([7], EXPECTED), Case([8], EXPECTED)]
RIGHT = {"": EXPECTED, "<[1]>": EXPECTED, "<[1]> <[2]>": EXPECTED}
"""What is answered, by the tokens that an answer has to begin with."""


def known() -> Known:
    """Float32 cannot tell token 5 from the first two of three; of the others, and of the last place, it is sure."""
    scores = torch.full((3, 10), -9.0)
    scores[range(3), EXPECTED] = -0.1
    scores[:2, OTHER] = -0.1
    return Known(Path(), CASES, [scores] * 2, np.array([0.01]))


def beginning(case: Case) -> str:
    told = case.rules["grammar"].text if "grammar" in case.rules else "start: <[*]>*"
    return told.removeprefix("start: ").removesuffix("<[*]>*").strip()


def check(of_second: dict[str, list[int]]) -> list[list[tuple[int, str]]]:
    """Return what was asked, where the first of two requests is answered right."""
    asked = []

    def ask(cases: Sequence[Case]) -> list[list[int]]:
        asked.append([(case.prompt[0], beginning(case)) for case in cases])
        return [(RIGHT if case.prompt == [7] else RIGHT | of_second)[beginning(case)] for case in cases]

    known().check_all_tokens(ask)
    return asked


def test_all_requests_are_asked_at_once_and_alone_behind_each_tie() -> None:
    assert check({}) == [[(7, ""), (8, "")]]
    asked = check({"": [OTHER, 9, 9], "<[1]>": [1, OTHER, 9]})
    assert asked == [[(7, ""), (8, "")], [(8, "<[1]>")], [(8, "<[1]> <[2]>")]]


@pytest.mark.parametrize("answer", [[1, 9, 3], [1, 2, OTHER], [1, 2], [1, 2, 3, 4], []])
def test_another_token_where_float32_is_sure_or_another_length_fails(answer: list[int]) -> None:
    with pytest.raises(AssertionError):
        check({"": answer})


@pytest.mark.parametrize("answer", [[1, 9, 3], [1, 2, OTHER], [1, 2], [OTHER, 2, 3], [OTHER, 9, 9], []])
def test_behind_a_tie_they_fail_too_and_so_does_another_beginning_than_was_told(answer: list[int]) -> None:
    with pytest.raises(AssertionError):
        check({"": [OTHER, 9, 9], "<[1]>": answer})


def test_a_clip_whose_answer_is_begun_is_sent_in_a_conversation_with_its_language() -> None:
    case = begun(Case([7], [], [b"clip"], http={"file": ("clip.wav", b"clip", "audio/wav"), "language": "en"}), [1])
    [part] = case.http["messages"][0]["content"]
    assert part["input_audio"] == {"data": base64.b64encode(b"clip").decode(), "format": "wav"}
    grammar = case.rules["grammar"].text
    assert case.http["extra_body"] == {"language": "en", "structured_outputs": {"grammar": grammar}}
    assert case.http.keys() == {"messages", "extra_body"}
