"""Secrets: the key of a cluster, the keys of the API's users, and the check of a header.

A cluster key is 32 random bytes, written as 64 hexadecimal digits (`openssl rand -hex 32`). What each purpose needs is
derived from it, so that nothing which is sent anywhere tells the key itself:

    cluster key --+-- "curve server", "curve client"   the CURVE key pairs of ZMQ sockets (broker.cluster.curve)
                  +-- "http"                           the token of a worker's own HTTP endpoints (`cluster_token`)
                  +-- "id"                             what tells two keys apart in the registry (`key_id`)
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from common.config import Settings
from common.errors import invalid

KEY_BYTES: Final = 32
_HEX_KEY: Final = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")


class ClusterKey:
    """The secret shared by the processes of a cluster. No `repr` and no message shows the text."""

    def __init__(self, text: str, source: str = "cluster_key") -> None:
        """Read 64 hexadecimal digits. Raises TriptychError("invalid_request") naming `source`, not the value."""
        if _HEX_KEY.fullmatch(text.strip()) is None:
            message = f"{source} must be {2 * KEY_BYTES} hexadecimal digits; make one: openssl rand -hex {KEY_BYTES}"
            raise invalid(message, "cluster_key")
        self._key = bytes.fromhex(text.strip())

    @classmethod
    def generate(cls) -> ClusterKey:
        """A new key from the system's random numbers."""
        return cls(secrets.token_hex(KEY_BYTES))

    @classmethod
    def of(cls, settings: Settings) -> ClusterKey | None:
        """Return the key named by the settings, by value or by file; None without a key.

        Raises TriptychError("invalid_request") for a file that cannot be read, or a key that is none.
        """
        if settings.cluster_key is not None:
            return cls(settings.cluster_key.get_secret_value())
        if settings.cluster_key_file is not None:
            return cls(_read(settings.cluster_key_file, "cluster_key_file"), str(settings.cluster_key_file))
        return None

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes for a purpose: HMAC-SHA256, as in the expansion of HKDF (RFC 5869)."""
        return hmac.new(self._key, b"triptych " + purpose.encode(), hashlib.sha256).digest()

    @property
    def key_id(self) -> str:
        """A name of the key that reveals no bit of the key."""
        return self.derive("id").hex()[:12]

    @property
    def token(self) -> str:
        """The bearer token of the workers' HTTP endpoints."""
        return self.derive("http").hex()

    def reveal(self) -> str:
        """Return the key in the form for files and child processes."""
        return self._key.hex()


def cluster_token(settings: Settings) -> str | None:
    """Return the bearer token for a worker's HTTP endpoints; None without a cluster key.

    A client sends `bearer(token)` as its `Authorization` header; a worker decides with `may_control`.
    """
    key = ClusterKey.of(settings)
    return None if key is None else key.token


def key_id(settings: Settings) -> str:
    """Return the `key_id` of this process's cluster key; empty without a key."""
    key = ClusterKey.of(settings)
    return "" if key is None else key.key_id


def bearer(token: str) -> str:
    """The value of an `Authorization` header."""
    return f"Bearer {token}"


def may_control(token: str | None, authorization: str | None, client_host: str | None) -> bool:
    """Return whether a caller may drain or switch a worker. The caller needs the cluster's token, or, in a cluster
    without a key, a call from this very machine.

    `token` is `cluster_token(settings)`, `authorization` the request's header, `client_host` its `request.client.host`.
    """
    if token is not None:
        return TokenSet([token]).accepts(authorization)
    try:
        return client_host is not None and ip_address(client_host).is_loopback
    except ValueError:
        return False


class TokenSet:
    """Bearer tokens, each of which opens the door. Only digests are kept."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = [_digest(token) for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, authorization: str | None) -> bool:
        """Return whether an `Authorization` header holds a token of the set. The time is the same for wrong and right
        tokens: all are compared, each in constant time, over digests of equal length."""
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def api_keys(settings: Settings) -> TokenSet:
    """Return the keys of the API's users, from environment and file; the file has a key per line, and `#` for comments.

    Raises TriptychError("invalid_request") for a file that cannot be read or has no key.
    """
    return TokenSet(_list_api_keys(settings))


def own_api_key(settings: Settings) -> str | None:
    """Return the key for this program's own clients; None if the API needs no key. Raises as `api_keys` does."""
    return next(iter(_list_api_keys(settings)), None)


def _list_api_keys(settings: Settings) -> list[str]:
    keys = [] if settings.api_key is None else [settings.api_key.get_secret_value()]
    if settings.api_key_file is not None:
        lines = (line.strip() for line in _read(settings.api_key_file, "api_key_file").splitlines())
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise invalid(f"api_key_file {settings.api_key_file} has no key; write one per line", "api_key_file")
        keys += found
    return keys


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _read(path: Path, setting: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise invalid(f"cannot read {setting} {path}: {reason}", setting) from error
