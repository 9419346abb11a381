"""What takes long to start, started side by side before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

Name = TypeVar("Name")
Thing = TypeVar("Thing")


@contextmanager
def side_by_side(
    makers: Mapping[Name, Callable[[], Thing]], close: Callable[[Thing], object]
) -> Iterator[dict[Name, Future[Thing]]]:
    """What came of each maker, none still at work: whoever asks for one that failed gets its error. `close` ends each
    thing after the `with` block."""
    with ExitStack() as stack:
        with ThreadPoolExecutor(max(1, len(makers))) as pool:
            made = {name: pool.submit(make) for name, make in makers.items()}
        for future in made.values():
            if future.exception() is None:
                stack.callback(close, future.result())
        yield made
