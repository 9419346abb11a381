"""Errors that cross a process boundary: a code per outcome on which a client can act."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from typing import Final, Literal

import msgspec

ErrorCode = Literal[
    "invalid_request",
    "bad_media",
    "context_length_exceeded",
    "item_too_large",
    "model_not_found",
    "not_found",
    "invalid_api_key",
    "overloaded",
    "unavailable",
    "timeout",
    "internal_error",
]

HTTP_STATUS: Final[dict[str, int]] = {
    "invalid_request": 400,
    "bad_media": 400,
    "context_length_exceeded": 400,
    "item_too_large": 413,
    "model_not_found": 404,
    "not_found": 404,
    "invalid_api_key": 401,
    "overloaded": 429,
    "unavailable": 503,
    "timeout": 504,
    "internal_error": 500,
}


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error in its form between processes.

    `message` says what was wrong, with the offending value, and what to do; `param` names the request field.
    """

    code: ErrorCode
    message: str
    param: str | None = None

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.code]

    @property
    def retryable(self) -> bool:
        """True where the same request may succeed a little later."""
        return self.code in ("overloaded", "unavailable", "timeout")


class TriptychError(Exception):
    """An error whose code reaches the client unchanged."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.info = ErrorInfo(code, message, param)

    def __reduce__(self) -> tuple[type[TriptychError], tuple[ErrorCode, str, str | None]]:
        """Pickle the error, for the way from a helper process to its parent."""
        return type(self), (self.info.code, self.info.message, self.info.param)


def words_of(error: BaseException) -> str:
    """Return what an exception says; its name where it says nothing, for it is true in any case."""
    return str(error) or type(error).__name__


def invalid(message: str, param: str | None = None) -> TriptychError:
    """Return the error of a request that is wrong in the field `param`."""
    return TriptychError("invalid_request", message, param)


def how_to_install(extras: str) -> str:
    """Return how to install Triptych with optional extras, as `worker,broker`; no package index has it."""
    return f"pip install '.[{extras}]' in a checkout, or the wheel with [{extras}]"


def closest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that offers the closest known name, rather one that begins alike; empty without."""
    close = get_close_matches(name, known)
    ratios = {one: SequenceMatcher(None, one, name).ratio() + 0.1 * (one[:3] == name[:3]) for one in close}
    best = max(ratios, key=ratios.__getitem__, default="")
    return f"; did you mean {best!r}?" if best else ""
