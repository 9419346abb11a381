"""Whisper's rules for timestamps (Radford et al., 2022; ApplyTimestampRules in its decoding.py)."""

from __future__ import annotations

import torch

from common.sampling_params import TimestampRules


def apply_timestamp_rules(row: torch.Tensor, generated: list[int], rules: TimestampRules, eos_token_id: int) -> None:
    """Forbid impossible successors of `generated`, the tokens after the forced prefix, in row [vocab_size], in place.

    Timestamps come in pairs (an end, then a start), except before the end of the text, and never go back. The first
    token is a timestamp. Where all timestamps together are likelier than the likeliest text token, the next is one.
    """
    first = rules.first_token_id
    row[rules.no_timestamps_token_id] = -torch.inf
    last_is_timestamp = bool(generated) and generated[-1] >= first
    opens_segment = last_is_timestamp and (len(generated) < 2 or generated[-2] >= first)
    closes_segment = last_is_timestamp and not opens_segment
    if opens_segment:
        row[first:] = -torch.inf
    elif closes_segment:
        row[:eos_token_id] = -torch.inf
    latest = next((token for token in reversed(generated) if token >= first), None)
    if latest is not None:
        # The start of a segment may equal the end of the one before; every other timestamp is later than the latest.
        row[first : latest + (0 if closes_segment else 1)] = -torch.inf
    if not generated:
        row[:first] = -torch.inf
        if rules.max_initial_index is not None:
            row[first + rules.max_initial_index + 1 :] = -torch.inf
    # Without a look at the answer: the host would wait for it.
    row[:first].masked_fill_(row[first:].logsumexp(dim=-1) > row[:first].amax(), -torch.inf)
