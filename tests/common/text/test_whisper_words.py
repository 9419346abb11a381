"""Words with times out of tokens: spaces, punctuation, pauses, and languages without spaces."""

from __future__ import annotations

import pytest

from common.text.whisper_words import words_of

PIECES = [" Hel", "lo", ",", ' "', "you", '"', " there", ".", " Yes", "日", "本"]


def decode(token_ids) -> str:
    return "".join(PIECES[token] for token in token_ids)


def told(token_ids, frames, language="en", begin_s=0.0):
    words = words_of(token_ids, frames, decode, language, begin_s)
    return [(word.text, round(word.start_s, 2), round(word.end_s, 2)) for word in words]


def test_tokens_make_words_with_their_punctuation():
    frames = [0, 10, 20, 22, 24, 40, 42, 60, 62]
    assert told([0, 1, 2, 3, 4, 5, 6, 7], frames) == [
        (" Hello,", 0.0, 0.4),
        (' "you"', 0.44, 0.8),
        (" there.", 0.84, 1.2),
    ]


def test_times_count_from_the_window():
    assert told([0, 1], [5, 10, 20], begin_s=30.0) == [(" Hello", 30.1, 30.4)]


def test_a_pause_behind_a_sentence_belongs_to_no_word():
    """The full stop lasts three seconds, and the word after it two."""
    words = told([0, 1, 7, 8, 6], [0, 10, 20, 170, 270, 290])
    assert words[0] == (" Hello.", 0.0, 0.4)
    assert words[1][2] == pytest.approx(5.4)
    assert words[1][1] >= 3.4


def test_characters_are_words_where_there_are_no_spaces():
    assert told([9, 10], [0, 5, 9], "ja") == [("日", 0.0, 0.1), ("本", 0.1, 0.18)]
    assert told([9, 10], [0, 5, 9], "en") == [("日本", 0.0, 0.18)]
