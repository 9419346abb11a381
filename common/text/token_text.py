"""Single tokens as text and as bytes, and the token sequences of words. A token need not be whole characters."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from common.text.processor import TextProcessor

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE: Final = "\u2581"


class TokenTexts:
    """The text of each token of a tokenizer, computed on demand and kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._decoders = _decoder_types(json.loads(tokenizer.to_str()).get("decoder"))
        self.bytes_of = functools.cache(self._find_bytes)
        """Returns the bytes a token adds to the text; none for unknown ids."""

    def string_of(self, token_id: int) -> str:
        """Return the text of a token, with U+FFFD for the bytes of a partial character."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders:
            return b"".join(_BYTE_OF.get(character, character.encode()) for character in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None and "ByteFallback" in self._decoders:
            return bytes([int(byte[1], 16)])
        if self._decoders & {"Metaspace", "Replace"}:
            return token.replace(_METASPACE, " ").encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def bad_words_ids(text: TextProcessor, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words: at the beginning of a text, and after a space if different."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(text.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(text.encode(f" {word.lstrip()}", add_special_tokens=False))
        found |= dict.fromkeys(ids for ids in (bare, spaced) if ids)
    return tuple(found)


def _decoder_types(decoder: Any) -> set[str]:
    if not decoder:
        return set()
    nested = [_decoder_types(part) for part in decoder.get("decoders", ())]
    return {str(decoder["type"])}.union(*nested)


def _byte_alphabet() -> dict[str, bytes]:
    """Return the characters for bytes in byte-level tokenizers: printable characters unchanged, all others from U+0100
    on, in order (Radford et al., 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(0x100 + number): bytes([byte]) for number, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()
