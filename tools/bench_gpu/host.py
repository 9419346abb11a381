"""Benchmarks in one process, as `tools.gpu_check.check` runs them: PyTorch, the engine and CUDA's context start once.

What is asked and answered is told in `tools.gpu_check.hosted`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

import torch

_IN, _OUT, _ERRORS = 0, 1, 2
_GOODBYE: Final = "goodbye"


def answer(run: Callable[[Sequence[str]], int]) -> None:
    """Run the words of every line of standard input, their output in their own log, until there are no more lines or
    the device does not answer any more."""
    asked, answers = os.fdopen(os.dup(_IN), "r"), os.fdopen(os.dup(_OUT), "w")  # nobody who is started here has them
    _redirect(os.devnull, os.O_RDONLY, _IN)
    for line in asked:
        told = json.loads(line)
        _redirect(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, _OUT, _ERRORS)
        status, goes_on = run(told["words"]), _device_answers()
        sys.stdout.flush()
        answers.write(f"{status}\n" if goes_on else f"{status} {_GOODBYE}\n")
        answers.flush()
        if not goes_on:
            return


def _device_answers() -> bool:
    """A fault of a kernel leaves nothing of this process's CUDA that could be used."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the device does not answer: {error}", file=sys.stderr)
        return False
    return True


def _redirect(path: str, flags: int, *targets: int) -> None:
    source = os.open(path, flags)
    for target in targets:
        os.dup2(source, target)
    os.close(source)
