"""Percent decoding for megabytes: `urllib.parse.unquote_to_bytes` makes two objects per encoded byte."""

from __future__ import annotations

from typing import Final

import numpy as np

_PIECE: Final = 2**20
_NONE: Final = 16
_DIGITS: Final = np.full(256, _NONE, np.uint8)
"""Value of each character as a hexadecimal digit; _NONE for other characters."""
for _digit in "0123456789abcdefABCDEF":
    _DIGITS[ord(_digit)] = int(_digit, 16)


def least_bytes(text: str) -> int:
    """Return a lower bound on the length of `unquote(text)`."""
    return len(text) - 2 * text.count("%")


def unquote(text: str) -> bytes:
    """Return the bytes of a text with %XX decoded; any other % stays."""
    data, pieces, begin = text.encode(), [], 0
    while begin < len(data):
        end = begin + _PIECE
        if end < len(data) and (split := data.find(b"%", end - 2, end)) >= 0:
            end = split  # keep a % and its digits together
        pieces.append(_unquote_piece(np.frombuffer(data[begin:end], np.uint8)))
        begin = end
    return b"".join(pieces)


def _unquote_piece(data: np.ndarray) -> bytes:
    at = np.flatnonzero(data[:-2] == ord("%"))
    high, low = _DIGITS[data[at + 1]], _DIGITS[data[at + 2]]
    valid = (high != _NONE) & (low != _NONE)
    at = at[valid]
    decoded, kept = data.copy(), np.ones(len(data), bool)
    decoded[at] = 16 * high[valid] + low[valid]
    kept[at + 1] = kept[at + 2] = False
    return decoded[kept].tobytes()
