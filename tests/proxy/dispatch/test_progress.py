"""The books of what has been delivered: whatever is repeated or moved, each token comes out once and in order."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import TriptychError
from common.messages import Resumed, TokenLogprob, Tokens
from common.sampling_params import SamplingParams
from proxy.dispatch.progress import Progress


def _messages(sequences: list[list[int]], have: dict[int, int]) -> list[Tokens]:
    """What a worker sends that goes on behind so many tokens of each sequence in `have`, in turns."""
    turns = [
        Tokens(
            "r",
            place,
            [sequences[index][place]],
            "stop" if place == len(sequences[index]) - 1 else None,
            index=index,
            logprobs=[TokenLogprob(sequences[index][place], -float(place), 1)],
        )
        for index, start in have.items()
        for place in range(start, len(sequences[index]))
    ]
    return sorted(turns, key=lambda tokens: tokens.offset)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 12), max_size=4),
    st.booleans(),
)
def test_losses_at_any_moment_neither_repeat_nor_skip(
    sequences: list[list[int]], losses: list[int], from_the_start: bool
) -> None:
    """`from_the_start`: a worker that knows nothing of resuming sends everything again."""
    progress = Progress(SamplingParams(n=len(sequences), max_tokens=100))
    told: dict[int, list[int]] = {index: [] for index in range(len(sequences))}
    ends: list[int] = []
    have = dict.fromkeys(told, 0)
    for count in [*losses, 1000]:
        for message in _messages(sequences, have)[:count]:
            news = progress.accept(message)
            if news is not None:
                assert news.offset == len(told[news.index])
                assert [entry.logprob for entry in news.logprobs] == [-float(news.offset)] * len(news.token_ids)
                told[news.index] += news.token_ids
                ends += [news.index] if news.finish_reason else []
        resumed = progress.start(set(), prefilled=False)
        assert [part.index for part in resumed] in ([], progress.rest(set()))
        if not from_the_start and resumed:
            have = {part.index: len(part.token_ids) for part in resumed}
        elif not progress.rest(set()):
            break
        else:
            have = dict.fromkeys(told, 0)
    assert told == dict(enumerate(sequences))
    assert sorted(ends) == sorted(told)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=3), st.sets(st.integers(0, 9))
)
def test_whatever_is_lost_an_answer_that_ends_is_whole(sequences: list[list[int]], lost: set[int]) -> None:
    messages = _messages(sequences, dict.fromkeys(range(len(sequences)), 0))
    messages[-1] = msgspec.structs.replace(messages[-1], done=True)
    progress = Progress(SamplingParams(n=len(sequences)))
    told: dict[int, list[int]] = {index: [] for index in range(len(sequences))}
    with contextlib.suppress(TriptychError):
        for message in (message for place, message in enumerate(messages) if place not in lost):
            news = progress.accept(message)
            assert news is not None
            told[news.index] += news.token_ids
    assert progress.done == lost.isdisjoint(range(len(messages)))
    assert not progress.done or told == dict(enumerate(sequences))


def test_a_gap_and_a_sequence_that_nobody_wanted_are_errors() -> None:
    progress = Progress(SamplingParams(n=2))
    progress.accept(Tokens("r", 0, [1], index=1))
    with pytest.raises(TriptychError, match="tokens 1 to 2 of sequence 1 were lost"):
        progress.accept(Tokens("r", 2, [3], index=1))
    with pytest.raises(TriptychError, match="sequence 2 came, 2 were asked for"):
        progress.accept(Tokens("r", 0, [3], index=2))


def test_the_last_message_of_all_does_not_end_a_sequence_whose_end_was_lost() -> None:
    progress = Progress(SamplingParams(n=3))
    progress.accept(Tokens("r", 0, [1], index=0))
    progress.accept(Tokens("r", 0, [2], "stop", index=1))
    last = Tokens("r", 0, [3], "stop", index=2, done=True)
    with pytest.raises(TriptychError, match="the end of sequence 0 was lost on the way") as caught:
        progress.accept(last)
    assert caught.value.info.retryable
    assert not progress.done
    assert progress.start(set(), prefilled=False) == [Resumed(0, [1]), Resumed(2, [])]
    assert progress.accept(last, {0}) == last, "nobody waits for the others"
    assert progress.done


def test_a_beam_search_may_find_fewer_than_were_asked_for_but_none_before_the_last_is_missing() -> None:
    beams = [Tokens("r", 0, [index], "stop", index=index, done=index == 1, score=-1.0) for index in range(2)]
    whole, cut = (Progress(SamplingParams(n=3, beam_width=3)) for _ in range(2))
    assert [whole.accept(beam) for beam in beams] == beams
    assert whole.done
    with pytest.raises(TriptychError, match="the end of sequence 0 was lost on the way"):
        cut.accept(beams[1])


def test_prompt_log_probabilities_are_told_once() -> None:
    progress = Progress(SamplingParams())
    first = Tokens("r", 0, [1], prompt_logprobs=[None])
    news = progress.accept(first)
    assert news is not None
    assert news.prompt_logprobs == [None]
    again = progress.accept(Tokens("r", 0, [1, 2], prompt_logprobs=[None]))
    assert again is not None
    assert (again.token_ids, again.prompt_logprobs) == ([2], [])


def test_a_sequence_of_full_length_is_complete_without_its_last_word() -> None:
    progress = Progress(SamplingParams(n=2, max_tokens=2))
    progress.accept(Tokens("r", 0, [1, 2], index=0))
    progress.accept(Tokens("r", 0, [1], index=1))
    assert [(tokens.index, tokens.offset, tokens.finish_reason) for tokens in progress.close()] == [(0, 2, "length")]
    assert progress.rest(set()) == [1]
    assert progress.rest({1}) == []
