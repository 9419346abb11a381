"""Number words and dates in English, German and French, with the spellings that numerals reads."""

from __future__ import annotations

import re
from datetime import date
from random import Random
from typing import Final


def _list(words: str) -> list[str]:
    return words.split()


LANGUAGES: Final = ("en", "de", "fr")
MONTHS: Final = {
    "en": _list("january february march april may june july august september october november december"),
    "de": _list("januar februar märz april mai juni juli august september oktober november dezember"),
    "fr": _list("janvier février mars avril mai juin juillet août septembre octobre novembre décembre"),
}
SHORT_MONTHS: Final = {
    "en": _list("jan feb mar apr may jun jul aug sep oct nov dec"),
    "de": _list("jan. feb. mär. apr. mai jun. jul. aug. sep. okt. nov. dez."),
    "fr": _list("janv. févr. mars avr. mai juin juil. août sept. oct. nov. déc."),
}
_ENGLISH: Final = _list(
    "zero one two three four five six seven eight nine ten eleven twelve "
    "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_ENGLISH_TENS: Final = _list("- ten twenty thirty forty fifty sixty seventy eighty ninety")
_GERMAN: Final = _list(
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf "
    "dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn"
)
_GERMAN_TENS: Final = _list("- zehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_FRENCH: Final = _list(
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze "
    "treize quatorze quinze seize dix-sept dix-huit dix-neuf"
)
_FRENCH_TENS: Final = _list("- dix vingt trente quarante cinquante soixante septante huitante nonante")
_DATES: Final = {
    "en": "{day} {month} {year}|{month} {day}, {year}|{month} {day} {year}|{ordinal} {month} {year}|"
    "{month} {ordinal}, {year}|the {ordinal} of {month} {year}|{day} {short} {year}|{short} {day}, {year}|"
    "the {ordinal} of {month}, {year}|{ordinal} of {month} {year}|{month} {ordinal} {year}|{short}. {day}, {year}|"
    "{year}-{number:02}-{day:02}",
    "de": "{day}. {month} {year}|{day} {month} {year}|{day:02}. {month} {year}|{day:02}.{number:02}.{year}|"
    "{day}.{number}.{year}|{day}. {short} {year}|der {day}. {month} {year}|{year}-{number:02}-{day:02}",
    "fr": "{ordinal} {month} {year}|{day} {month} {year}|le {ordinal} {month} {year}|{day} {short} {year}|"
    "{year}-{number:02}-{day:02}",
}
_ORDINALS: Final[dict[str, dict[int, str]]] = {
    "en": {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd", 31: "st"},
    "de": {},
    "fr": {1: "er"},
}
MORPHEMES: Final = sorted(
    {
        *(_ENGLISH + _ENGLISH_TENS + _list("hundred thousand and")),
        *(_GERMAN + _GERMAN_TENS + _list("eins hundert tausend und dreissig fuenf fuenfzehn fuenfzig zwoelf")),
        *(_FRENCH + _FRENCH_TENS + _list("zero cent cents mille et quatre vingt vingts")),
        *(month.rstrip(".") for table in (MONTHS, SHORT_MONTHS) for names in table.values() for month in names),
        *_list("maerz fevrier aout decembre fevr dec"),
    }
    - {"-", "dix-sept", "dix-huit", "dix-neuf"}
)
"""Each a token of the tokenizer, alone or after a space."""


def to_words(language: str, number: int) -> str:
    """Return the plain words of a number from 0 to 999,999: `one thousand two hundred four`, `einhunderteins`."""
    if language == "fr":
        return french(number)
    return _compound(language, number) + ("s" if language == "de" and number % 100 == 1 else "")


def _compound(language: str, number: int) -> str:
    joint, names = (" ", ("thousand", "hundred")) if language == "en" else ("", ("tausend", "hundert"))
    for size, name in zip((1000, 100), names, strict=True):
        count, rest = divmod(number, size)
        if count:
            return joint.join([_compound(language, count), name, *([_compound(language, rest)] if rest else [])])
    tens, units = divmod(number, 10)
    if language == "en":
        return _ENGLISH[number] if number < 20 else _ENGLISH_TENS[tens] + (f"-{_ENGLISH[units]}" if units else "")
    return _GERMAN[number] if number < 20 else (f"{_GERMAN[units]}und" if units else "") + _GERMAN_TENS[tens]


def french(number: int, *, is_swiss: bool = False) -> str:
    """Return the words of France, hyphens below a hundred only; Swiss ones have septante, huitante and nonante."""
    for size, name in ((1000, "mille"), (100, "cent")):
        count, rest = divmod(number, size)
        if count:
            before = "" if count == 1 else french(count, is_swiss=is_swiss) + " "
            before = re.sub(r"(cent|vingt)s $", r"\1 ", before)  # a plural stands at the end alone
            plural = "s" if size == 100 and count > 1 and not rest else ""
            return f"{before}{name}{plural}" + (f" {french(rest, is_swiss=is_swiss)}" if rest else "")
    tens, units = divmod(number, 10)
    if number < 20:
        return _FRENCH[number]
    if tens >= 7 and not is_swiss:  # by twenties
        plain = {80: "quatre-vingts", 71: "soixante et onze"}
        first, below = ("soixante", 60) if tens == 7 else ("quatre-vingt", 80)
        return plain.get(number) or f"{first}-{_FRENCH[number - below]}"
    return _FRENCH_TENS[tens] + ("" if not units else " et un" if units == 1 else f"-{_FRENCH[units]}")


def spell(language: str, number: int, rng: Random) -> str:
    """Return the words of a number in a spelling drawn at random; a third of the spellings are the plain ones."""
    if rng.random() < 1 / 3:
        return to_words(language, number)
    return {"en": _spell_english, "de": _spell_german, "fr": _spell_french}[language](number, rng)


def _spell_english(number: int, rng: Random) -> str:
    words = to_words("en", number)
    if rng.random() < 0.5:  # British: "one hundred and four", "one thousand and four"
        words = re.sub(r"hundred (?!thousand)", "hundred and ", words)
        words = re.sub(r"thousand (?!.*hundred)", "thousand and ", words)
    if rng.random() < 0.25:
        words = re.sub(r"thousand (?=.*hundred)", "thousand, ", words)
    if rng.random() < 0.25:
        words = re.sub(r"^one (?=hundred|thousand)", "a ", words)
    return _with_hyphens(words, rng)


def _with_hyphens(words: str, rng: Random) -> str:
    """Return words with hyphens nowhere, everywhere, anywhere, or as they are; none follows a comma."""
    match rng.randrange(8):
        case 0 | 1 | 2 | 3:
            return words.replace("-", " ")
        case 4:
            return re.sub("(?<!,) ", "-", words)
        case 5:
            return re.sub("(?<!,)[ -]", lambda _: rng.choice(" -"), words)
    return words


def _spell_german(number: int, rng: Random) -> str:
    words = to_words("de", number)
    if rng.random() < 0.3:
        words = re.sub(r"(?<=hundert)ein(?=tausend)", "eins", words)
    if rng.random() < 0.4:
        words = re.sub(r"^ein(?=hundert|tausend)", "", words)
    if rng.random() < 0.3 and 0 < number % 100 < 13 and number > 100:
        words = re.sub(r"(.*)(hundert|tausend)", r"\1\2und", words)
    if rng.random() < 0.3:
        words = _without_accents(words)
    if rng.random() < 0.3:
        marks = rng.choice((" ", "-", ("", " ", "-")))  # one everywhere, or any of three at each joint
        words = re.sub(r"tausend|hundert|und(?!ert)", lambda m: rng.choice(marks) + m[0] + rng.choice(marks), words)
        words = re.sub("([ -])[ -]", r"\1", words.strip(" -"))
    return words


def _spell_french(number: int, rng: Random) -> str:
    words = french(number, is_swiss=rng.random() < 0.2)
    return _with_hyphens(words.replace("é", "e") if rng.random() < 0.25 else words, rng)


def _without_accents(text: str) -> str:
    """Return German and French words as typed on an English keyboard."""
    for letter, plain in {"ß": "ss", "ü": "ue", "ö": "oe", "ä": "ae", "é": "e", "û": "u"}.items():
        text = text.replace(letter, plain)
    return text


def spell_date(language: str, day: date, rng: Random) -> str:
    """Return a date in a spelling of the language drawn at random; none has the ambiguous month between slashes."""
    text = rng.choice(_DATES[language].split("|")).format(
        day=day.day,
        number=day.month,
        year=day.year,
        ordinal=f"{day.day}{_ORDINALS[language].get(day.day, 'th' if language == 'en' else '')}",
        month=MONTHS[language][day.month - 1],
        short=SHORT_MONTHS[language][day.month - 1],
    )
    return _without_accents(text) if rng.random() < 0.1 else text
