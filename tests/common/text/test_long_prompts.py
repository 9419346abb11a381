"""Prompts of any length: those that fit are tokenised whole, those that cannot are refused before that costs memory."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from common.errors import TriptychError
from common.model_info import load_model_info
from common.text.processor import TextProcessor

MIB = 2**20


class Counting(TextProcessor):
    """Counts the characters that it tokenises."""

    num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture(scope="module")
def text() -> Counting:
    return Counting(load_model_info("signpost"))


@pytest.fixture(autouse=True)
def _from_zero(text: Counting) -> None:
    text.num_chars = 0


@pytest.mark.parametrize("word", ["hello ", "a", " ", "é", "\N{PARTY POPPER}"])
def test_a_text_that_is_far_too_long_is_refused_before_much_of_it_is_tokenised(text: Counting, word: str) -> None:
    with pytest.raises(TriptychError, match=f"too short for {4 * MIB} characters; shorten the prompt") as caught:
        text.encode_prompt((word * (4 * MIB))[: 4 * MIB], "prompt")
    assert (caught.value.info.code, caught.value.info.param) == ("context_length_exceeded", "prompt")
    assert text.num_chars <= MIB


def test_blanks_of_which_a_tokenizer_makes_nothing_are_refused_by_their_number(
    text: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = Tokenizer(models.WordLevel({"sign": 0, "?": 1}, unk_token="?"))
    blind.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    monkeypatch.setattr(text, "tokenizer", blind)
    assert text.encode_prompt(" " * 100_000 + "sign", "prompt") == [0]
    text.num_chars = 0
    with pytest.raises(TriptychError, match="too short for 4194304 characters"):
        text.encode_prompt(" " * (4 * MIB), "prompt")
    assert text.num_chars == 0


def test_a_conversation_that_is_far_too_long_is_refused_by_its_field(text: Counting) -> None:
    with pytest.raises(TriptychError) as caught:
        text.render_chat([{"role": "user", "content": "hello " * MIB}])
    assert (caught.value.info.code, caught.value.info.param) == ("context_length_exceeded", "messages")
    assert text.num_chars <= MIB


@pytest.mark.parametrize("num_words", [1, 700, 4000])
def test_what_may_fit_is_tokenised_as_a_whole(text: Counting, num_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.text.processor._PIECE_CHARS", 1000)
    whole = "sign " * num_words
    assert text.encode_prompt(whole, "prompt") == text.tokenizer.encode(whole).ids
