"""Text of a growing sequence equals the text of the whole, whatever the bytes."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from common.model_info import load_model_info
from common.text.processor import Detokenizer, TextProcessor
from common.text.token_text import _BYTE_OF
from tests.tiny_models import make_whisper


@pytest.fixture
def llamas() -> Any:
    """A tokenizer that falls back to bytes, as Llama's and Mistral's do."""
    vocab = {
        token: number for number, token in enumerate(["▁Hello", "lo", *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="lo"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    text = SimpleNamespace(tokenizer=tokenizer, no_timestamps_token_id=None)
    text.decode = lambda ids, **options: TextProcessor.decode(text, ids, **options)  # type: ignore[arg-type]
    return text


def ids_of(text: Any, *parts: str | bytes) -> list[int]:
    return [
        text.tokenizer.token_to_id(token)
        for part in parts
        for token in ([part] if isinstance(part, str) else [f"<0x{byte:02X}>" for byte in part])
    ]


@pytest.mark.parametrize("seed", range(20))
def test_pushed_in_any_portions_the_text_is_that_of_the_whole(llamas: Any, seed: int) -> None:
    dice, parts = random.Random(seed), ["▁Hello", "lo", "é".encode(), "日".encode(), "🙂".encode()]
    ids = ids_of(llamas, *dice.choices(parts, k=12))
    detokenizer, text = Detokenizer(llamas), ""
    while ids_left := len(ids) - len(detokenizer._ids):
        portion = ids[len(detokenizer._ids) :][: dice.randint(1, 4)]
        text += detokenizer.push(portion, final=len(portion) == ids_left)
    assert text == llamas.decode(ids)


def count_decoded(text: Any) -> list[int]:
    """Return a list that will hold the number of tokens of each call of `decode`."""
    decode, sizes = text.decode, list[int]()

    def counted(ids: list[int], **options: Any) -> str:
        sizes.append(len(ids))
        return str(decode(ids, **options))

    text.decode = counted
    return sizes


def test_bytes_that_are_no_text_after_a_whole_character_do_no_harm(llamas: Any) -> None:
    """`tokenizers`' own stream raises here: the broken byte takes back the character before it."""
    ids = ids_of(llamas, "▁Hello", "é".encode(), b"\x97", "lo")
    stream = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(llamas.tokenizer, token) for token in ids]
    detokenizer = Detokenizer(llamas)
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.push([], final=True)
    assert text.startswith(" Helloé")
    assert text.endswith("lo")


def test_a_long_run_of_special_tokens_is_not_decoded_again_with_each(llamas: Any) -> None:
    """As a model writes them that goes on behind its end. The blank of a word behind them stays."""
    llamas.tokenizer.add_special_tokens(["</s>"])
    [hello, half, rest] = ids_of(llamas, "▁Hello", "é".encode())
    end, decode, sizes = llamas.tokenizer.token_to_id("</s>"), llamas.decode, count_decoded(llamas)
    ids = [hello, *[end] * 100, hello, half, *[end] * 3, rest]
    detokenizer = Detokenizer(llamas)
    assert "".join(map(detokenizer.push, ([token] for token in ids))) == decode(ids)
    assert detokenizer.num_tokens == len(ids)
    assert max(sizes) < 20


@pytest.mark.parametrize("run", [b"\x80" * 100, b"\xe2" * 100, b"\xff\x97" * 50 + "é".encode()], ids="abc")
def test_a_long_run_of_bytes_that_are_no_text_is_not_decoded_again_with_each(llamas: Any, run: bytes) -> None:
    decode, sizes, detokenizer = llamas.decode, count_decoded(llamas), Detokenizer(llamas)
    ids = ids_of(llamas, "▁Hello", run, "lo", "é".encode())
    assert "".join(map(detokenizer.push, ([token] for token in ids))) == decode(ids)
    assert max(sizes) < 20


@pytest.mark.parametrize(
    "run", [b"\x80\x80" + "日日日日日".encode(), b"\xe0\xa4" + "हिन्दी".encode(), "\ufffd\ufffd\ufffd".encode()]
)
def test_what_follows_bytes_that_become_text_late_is_neither_lost_nor_a_stop_string_missed(
    llamas: Any, run: bytes
) -> None:
    """With a token before it, some of the bytes are text that were none before."""
    ids = ids_of(llamas, run, "▁Hello", "lo", "▁Hello")
    detokenizer, stopping = Detokenizer(llamas), Detokenizer(llamas, ["Hellolo"])
    assert "".join(map(detokenizer.push, ([token] for token in ids))).endswith(" Hellolo Hello")
    stopping.push(ids)
    assert stopping.stopped
    assert stopping.num_tokens == len(ids) - 1


@pytest.mark.parametrize("cut", [1, 2, 3, 5], ids="{} bytes a token".format)
@pytest.mark.parametrize("seed", range(5))
def test_characters_may_be_cut_by_each_of_many_tokens(cut: int, seed: int) -> None:
    """As byte-level tokenizers cut rare scripts: no token ends where a character does. Some bytes are no text."""
    dice = random.Random(seed)
    data = b"a" + "".join(dice.choices("éह日🙂\ufffd", k=40)).encode() + dice.randbytes(40) + "हह".encode() * 40
    letters = {byte: letter for letter, [byte] in _BYTE_OF.items()}
    tokens = ["".join(letters[byte] for byte in data[at : at + cut]) for at in range(0, len(data), cut)]
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(dict.fromkeys(tokens))}, ""))
    tokenizer.decoder = decoders.ByteLevel()
    text: Any = SimpleNamespace(decode=lambda ids, **_: tokenizer.decode(ids))
    sizes, detokenizer = count_decoded(text), Detokenizer(text)
    pushed = [detokenizer.push([tokenizer.token_to_id(token)]) for token in tokens]
    assert "".join(pushed) + detokenizer.push([], final=True) == data.decode(errors="replace")
    assert max(sizes) < 20


def test_stop_strings_are_found_across_tokens_and_held_back(llamas: Any) -> None:
    detokenizer = Detokenizer(llamas, ["éé"])
    pushed = [detokenizer.push([token]) for token in ids_of(llamas, "▁Hello", "é".encode(), "lo", "éé".encode(), "lo")]
    assert pushed == [" Hello", "", "", "élo", "", "", "", "", ""]
    assert detokenizer.stopped


@pytest.mark.parametrize(("includes_stop", "expected"), [(False, " H"), (True, " He")])
def test_the_first_stop_string_in_the_text_ends_it_in_whatever_order_they_are_listed(
    llamas: Any, includes_stop: bool, expected: str
) -> None:
    for stop in (["o", "e"], ["e", "o"]):
        detokenizer = Detokenizer(llamas, stop, includes_stop=includes_stop)
        assert detokenizer.push(ids_of(llamas, "▁Hello")) == expected


@pytest.mark.parametrize("seed", range(20))
def test_pushed_in_any_portions_the_text_ends_where_it_ends_token_by_token(llamas: Any, seed: int) -> None:
    """A beam comes whole, and its first tokens may hold what stops later ones."""
    dice = random.Random(seed)
    ids, least = ids_of(llamas, *dice.choices(["▁Hello", "lo", "é".encode(), b"l", b"o"], k=12)), dice.randrange(10)
    one, other = (Detokenizer(llamas, ["olo", "lo", "é"], min_tokens=least) for _ in range(2))
    expected = "".join(one.push([token]) for token in ids) + one.push([], final=True)
    cut = dice.randrange(len(ids))
    assert other.push(ids[:cut]) + other.push(ids[cut:], final=True) == expected
    assert other.stopped == one.stopped


@pytest.mark.parametrize(("prompt", "expected"), [([], "Hello Hello"), ([0] * 9, " Hello Hello")])
def test_the_blank_at_the_start_of_a_text_is_left_out_and_that_behind_a_prompt_is_not(
    llamas: Any, prompt: list[int], expected: str
) -> None:
    """As SentencePiece's tokenizers write it."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    llamas.tokenizer.decoder = decoders.Sequence(steps)
    detokenizer = Detokenizer(llamas, ["lo"], min_tokens=2, prompt=prompt)
    assert detokenizer.push(ids_of(llamas, "▁Hello", "▁Hello")) == expected
    assert not detokenizer.stopped, "tokens of the prompt do not count"
    detokenizer.push(ids_of(llamas, "lo"))
    assert detokenizer.stopped


def test_timestamps_are_no_text_whoever_asked_for_none(tmp_path: Path) -> None:
    """A decoder makes some behind <|notimestamps|>, too; Whisper's tokenizers do not call them special."""
    text = TextProcessor(load_model_info(str(make_whisper(tmp_path))))
    ids = text.encode("<|0.00|> Hi<|2.40|><|2.40|> you<|30.00|>", add_special_tokens=False)
    detokenizer = Detokenizer(text)
    assert "".join(detokenizer.push([token]) for token in ids) == text.decode(ids) == " Hi you"
    assert text.decode(ids, skip_special_tokens=False).startswith("<|0.00|> Hi<|2.40|>")
