"""Content hashes of media, by their bytes and never by their URL, and checksums of tensors in transit."""

from __future__ import annotations

import hashlib
from typing import Final, TypeAlias

import xxhash

checksum: Final = xxhash.xxh3_64_intdigest
"""XXH3 (64 bits) of a tensor's bytes. The hash finds damage by memory or network, at the speed of memory.

No protection against somebody who means harm: that is what keys are for."""
Checksum: TypeAlias = xxhash.xxh3_64
"""`checksum` of bytes that come piece by piece: `update` adds a piece, `intdigest` is the checksum so far."""


def content_hash(kind: str, media: bytes) -> str:
    """Return the hash of a media item: 32 hex digits of BLAKE2b over kind and bytes.

    The kind is part of it because the same bytes mean different inputs to different encoders.
    """
    digest = hashlib.blake2b(kind.encode() + b"\0", digest_size=16)
    digest.update(media)
    return digest.hexdigest()
