"""Number words and dates as grammars have them, and spellings that mean one number alone."""

from __future__ import annotations

from datetime import date
from random import Random

import pytest

from tools.numerals.words import LANGUAGES, french, spell, spell_date, to_words

TABLE = """
0       | zero                                 | null                     | zéro
1       | one                                  | eins                     | un
21      | twenty-one                           | einundzwanzig            | vingt et un
71      | seventy-one                          | einundsiebzig            | soixante et onze
80      | eighty                               | achtzig                  | quatre-vingts
99      | ninety-nine                          | neunundneunzig           | quatre-vingt-dix-neuf
100     | one hundred                          | einhundert               | cent
201     | two hundred one                      | zweihunderteins          | deux cent un
300     | three hundred                        | dreihundert              | trois cents
1000    | one thousand                         | eintausend               | mille
1204    | one thousand two hundred four        | eintausendzweihundertvier | mille deux cent quatre
80000   | eighty thousand                      | achtzigtausend           | quatre-vingt mille
101001  | one hundred one thousand one         | einhunderteintausendeins | cent un mille un
200016  | two hundred thousand sixteen         | zweihunderttausendsechzehn | deux cent mille seize
999999  | nine hundred ninety-nine thousand nine hundred ninety-nine \
        | neunhundertneunundneunzigtausendneunhundertneunundneunzig \
        | neuf cent quatre-vingt-dix-neuf mille neuf cent quatre-vingt-dix-neuf
"""


@pytest.mark.parametrize("row", TABLE.strip().splitlines(), ids=lambda row: row.split()[0])
def test_plain_words(row: str) -> None:
    number, *words = (cell.strip() for cell in row.split("|"))
    assert [to_words(language, int(number)) for language in LANGUAGES] == words


def test_swiss_words_count_on_by_tens() -> None:
    words = [french(number, is_swiss=True) for number in (71, 80, 99, 381_000)]
    assert words == ["septante et un", "huitante", "nonante-neuf", "trois cent huitante et un mille"]


def test_no_spelling_means_two_numbers() -> None:
    """Of any language: the digits can be told from the words, and for the same text they are the same."""
    rng, meaning = Random(1), dict[str, int]()
    numbers = [*range(2000), *(rng.randrange(1_000_000) for _ in range(4000))]
    for number in numbers:
        for language in LANGUAGES:
            for text in (to_words(language, number), *(spell(language, number, rng) for _ in range(4))):
                assert meaning.setdefault(text, number) == number, text


@pytest.mark.parametrize(
    ("language", "wanted"),
    [
        ("en", {"one hundred four", "one hundred and four", "a hundred and four"}),
        ("de", {"einhundertvier", "hundertvier", "hundertundvier", "ein hundert vier", "ein-hundert-vier"}),
        ("fr", {"cent quatre", "cent-quatre"}),
    ],
)
def test_spellings_have_hyphens_and_ands_or_not(language: str, wanted: set[str]) -> None:
    rng = Random(2)
    assert wanted <= {spell(language, 104, rng) for _ in range(300)}


@pytest.mark.parametrize(
    ("language", "wanted"),
    [
        ("en", {"two thousand-four", "two-thousand four"}),
        ("de", {"zwei-tausendvier", "zweitausend vier", "zwei-tausend vier"}),
        ("fr", {"deux mille-quatre", "deux-mille quatre"}),
    ],
)
def test_hyphens_stand_at_some_joints_alone(language: str, wanted: set[str]) -> None:
    rng = Random(4)
    assert wanted <= {spell(language, 2004, rng) for _ in range(1000)}


@pytest.mark.parametrize(
    ("language", "wanted"),
    [
        ("en", {"1 march 2021", "march 1, 2021", "the 1st of march 2021", "1 mar 2021"}),
        ("de", {"1. märz 2021", "01.03.2021", "1.3.2021", "1. maerz 2021"}),
        ("fr", {"1er mars 2021", "le 1er mars 2021", "1 mars 2021"}),
    ],
)
def test_spellings_of_a_date(language: str, wanted: set[str]) -> None:
    rng = Random(3)
    found = {spell_date(language, date(2021, 3, 1), rng) for _ in range(400)}
    assert wanted <= found
    assert not any("/" in text for text in found)
