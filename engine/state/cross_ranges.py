"""Visible encoder rows of each token, for cross-attention to inputs within the prompt.

Mllama's rules, as transformers has them. Inputs with no text between them form a group; text reads the group before it,
and of each input only the rows that are visible (those of real tiles). Text before the first input reads all rows of
all inputs, the others included: transformers lifts the mask of a token that would see nothing, and its answers depend
on that. To make every token's rows one range, a request's table holds what is not visible at its end. The last group
stands at its beginning: what is generated reads that one, and kernels over pages begin with the first row.

    prompt      a b  P0  c d  P1 P2  e f              P: placeholders, one token each
    table       V1 V2 V0 H1 H2 H0                     V: visible rows of an input, H: its other rows

    a b         V1 V2 V0 H1 H2 H0
    P0 c d            V0
    P1          V1
    P2 e f      V1 V2          and so does everything that is generated
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.state.spec import IntArray


@dataclass(frozen=True)
class CrossInput:
    """An input of a request: the placeholder's place in the prompt, and the rows of the encoder output."""

    position: int
    num_rows: int
    num_visible: int


def table_rows(outputs: Sequence[torch.Tensor], inputs: Sequence[CrossInput]) -> torch.Tensor:
    """Concatenate the encoder outputs of a request, [num_rows, hidden] each, as rows of its table."""
    order = [index for group in _last_group_first(inputs) for index in group]
    visible = [outputs[index][: inputs[index].num_visible] for index in order]
    hidden = [outputs[index][inputs[index].num_visible :] for index in order]
    return torch.cat(visible + hidden)


def write_ranges(
    inputs: Sequence[CrossInput], first: int, key_ranges: IntArray, after_input: npt.NDArray[np.bool_]
) -> None:
    """Write what n tokens of a sequence read, the first of them at position `first`.

    Token i reads rows key_ranges[i, 0] .. [i, 1] of the request's table; after_input[i] tells whether it is a
    placeholder or follows one. `inputs` stand in the order of the prompt. Without any, all ranges are empty.
    """
    row, rows = 0, dict[int, tuple[int, int]]()  # of the token at each placeholder and of the text behind it
    for group in _last_group_first(inputs):
        begin = row
        for index in group:
            row += inputs[index].num_visible
            rows[index] = begin, row
    key_ranges[:] = 0, sum(item.num_rows for item in inputs)
    after_input[:] = False
    for index, item in enumerate(inputs):
        behind = max(item.position - first, 0)
        key_ranges[behind:] = rows[index]
        after_input[behind:] = True


def groups_of(positions: Sequence[int | None]) -> list[list[int]]:
    """Group input numbers by adjacent places in a prompt. None, outside of a prompt, is a group alone."""
    groups: list[list[int]] = []
    end = None
    for index, position in enumerate(positions):
        if position is None or position != end:
            groups.append([])
        groups[-1].append(index)
        end = None if position is None else position + 1
    return groups


def _last_group_first(inputs: Sequence[CrossInput]) -> list[list[int]]:
    return groups_of([item.position for item in inputs])[::-1]
