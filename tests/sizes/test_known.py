"""The comparison with what transformers answers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.equality.cases import Case
from tests.sizes.known import Known

PROMPT, EXPECTED, OTHER = [7, 8], [1, 2, 3], 5


def known() -> Known:
    """Float32 cannot tell token 5 from the first of three; of the others it is sure."""
    scores = torch.full((3, 10), -9.0)
    scores[range(3), EXPECTED] = -0.1
    scores[0, OTHER] = -0.1
    return Known(Path(), [Case(PROMPT, EXPECTED)], [scores], np.array([0.01]))


def test_behind_a_tie_the_answer_goes_on_from_the_token_of_float32() -> None:
    asked = []

    def ask(case: Case, count: int) -> list[int]:
        asked.append((case.prompt, count))
        return [OTHER, 9, 9] if case.prompt == PROMPT else [2, 3]

    known().check_all_tokens(ask)
    assert asked == [(PROMPT, 3), ([*PROMPT, 1], 2)]


@pytest.mark.parametrize("answer", [[1, OTHER, 3], [1, 2]])
def test_another_token_where_float32_is_sure_or_a_short_answer_fails(answer: list[int]) -> None:
    with pytest.raises(AssertionError):
        known().check_all_tokens(lambda case, count: answer)
    with pytest.raises(AssertionError):
        known().check_tokens([answer])
