"""Names for blocks by content: a chain of hashes over tokens, inputs and the kind of positions.

    root ── h0 = H(root, tokens 0..15, inputs in them) ── h1 = H(h0, tokens 16..31, …) ── …

Equal hashes mean equal keys and values: a token's depend on everything before it, and the chain covers just that. The
root holds what is not in the tokens: the encoder content that cross-attention reads, and how positions are counted.
An input is its content hash and how far the block is into it, since its placeholder tokens are all alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

HASH_BYTES = 16


def root_hash(encoder_content: str, *, uses_mrope: bool) -> bytes:
    """Return the start of a chain. Any string is valid content."""
    return hashlib.blake2b(f"{uses_mrope}|{encoder_content}".encode(), digest_size=HASH_BYTES).digest()


def extend_chain(
    chain: list[bytes],
    root: bytes,
    token_ids: Sequence[int],
    num_tokens: int,
    block_size: int,
    inputs: Sequence[tuple[int, int, str]] = (),
) -> None:
    """Append the hashes of all blocks filled by the first `num_tokens` tokens. `inputs` are (start, end, content)."""
    for index in range(len(chain), num_tokens // block_size):
        begin, end = index * block_size, (index + 1) * block_size
        digest = hashlib.blake2b(chain[-1] if chain else root, digest_size=HASH_BYTES)
        digest.update(np.asarray(token_ids[begin:end], np.int64).tobytes())
        for start, stop, content in inputs:
            if start < end and stop > begin:
                digest.update(f"|{begin - start}:{content}".encode())
        chain.append(digest.digest())
