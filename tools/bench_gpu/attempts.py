"""Parts of a benchmark that fail each for itself: what went wrong is a row, and the next part is measured."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator

import torch

from tools.gpu_check.figures import Figure, failure


def attempted(benchmark: str, case: str, measure: Callable[[], Iterable[Figure]]) -> Iterator[Figure]:
    """The figures of one part as they come, and a row with the error if it fails; the traceback is printed.

    The device's memory that the part has let go of is free for the next one.
    """
    try:
        yield from measure()
    except Exception as error:
        traceback.print_exc()
        yield failure(benchmark, case, error)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
