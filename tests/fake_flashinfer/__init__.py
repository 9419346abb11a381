"""Stands in for the package `flashinfer` on a CPU: the calls that the engine makes, with the same signatures, computed
densely in float32. It refuses what the real one refuses, and what it would silently do wrong.

Whether the signatures are still FlashInfer's is a test (test_flashinfer_signatures.py).
"""

from tests.fake_flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from tests.fake_flashinfer.page import append_paged_kv_cache
from tests.fake_flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "append_paged_kv_cache",
]
