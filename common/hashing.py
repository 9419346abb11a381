"""Content hashes: media are known by their bytes, never by their URL. And checksums of what travels."""

from __future__ import annotations

import hashlib

import xxhash


def content_hash(kind: str, media: bytes) -> str:
    """Hash of one media item: 32 hex digits of BLAKE2b over its kind and its bytes.

    The kind is part of it because the same bytes mean different inputs to different encoders.
    """
    digest = hashlib.blake2b(kind.encode() + b"\0", digest_size=16)
    digest.update(media)
    return digest.hexdigest()


def rendezvous_score(key: str, instance_id: str) -> int:
    """Weight of an instance for a key in rendezvous (highest random weight) hashing (Thaler and Ravishankar, 1998)."""
    return int.from_bytes(hashlib.blake2b(f"{key}\0{instance_id}".encode(), digest_size=8).digest())


def checksum(data: bytes | memoryview) -> int:
    """XXH3 (64 bits) of the bytes of a tensor: finds what memory or a network has damaged, at the speed of memory.

    No protection against somebody who means harm: that is what keys are for.
    """
    return xxhash.xxh3_64_intdigest(data)


class Checksum:
    """The same of bytes that come one piece after the other."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def update(self, data: memoryview) -> None:
        self._digest.update(data)

    @property
    def value(self) -> int:
        """Of all bytes so far."""
        return self._digest.intdigest()
