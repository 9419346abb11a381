"""Names for blocks by content: a chain of hashes over tokens, inputs and the kind of positions.

    root ── h0 = H(root, tokens 0..15, inputs in them) ── h1 = H(h0, tokens 16..31, …) ── …

Equal hashes mean equal keys and values: a token's depend on everything before it, and the chain covers just that. The
root holds what is not in the tokens: the encoder content that cross-attention reads, how positions are counted, and the
adapter.
An input is its content hash and how far the block is into it, since its placeholder tokens are all alike.
"""

from __future__ import annotations

import hashlib

import numpy as np

from engine.state.request import Request, Sequence

HASH_BYTES = 16


def extend_hashes(request: Request, sequence: Sequence, num_tokens: int, block_size: int) -> list[bytes]:
    """Return the hashes of the blocks filled by the first `num_tokens` of a sequence (kept by the sequence)."""
    chain, num_blocks = sequence.hashes, num_tokens // block_size
    if not chain and num_blocks:
        root = f"{request.uses_mrope}|{request.encoder_content}|{request.sampling.adapter}".encode()
        chain_end = hashlib.blake2b(root, digest_size=HASH_BYTES).digest()
    else:
        chain_end = chain[-1] if chain else b""
    for index in range(len(chain), num_blocks):
        begin, end = index * block_size, (index + 1) * block_size
        digest = hashlib.blake2b(chain_end, digest_size=HASH_BYTES)
        digest.update(np.asarray(sequence.token_ids[begin:end], np.int64).tobytes())
        for item in request.inputs:
            if item.start is not None and item.end is not None and item.start < end and item.end > begin:
                digest.update(f"|{begin - item.start}:{item.slot.content_hash}".encode())
        chain_end = digest.digest()
        chain.append(chain_end)
    return chain[:num_blocks]
