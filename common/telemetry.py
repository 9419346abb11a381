"""Logs and clocks, the same in every process."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO, cast

import structlog

from common.messages import Span


class _Unfailing:
    """A stream that may lose lines: no process fails because its log cannot be written, as on a full disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # the latter where it has been closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def setup_logging(level: str, fmt: str, instance: str, *, libraries: bool = True) -> None:
    """Log to stderr, each line with date, time zone and the `instance` of this process.

    With `libraries`, warnings by `logging` that no handler takes are such lines, too.
    """
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if fmt == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%f%z", utc=False),
        structlog.processors.format_exc_info,
    ]
    stream = cast(TextIO, _Unfailing(sys.stderr))
    structlog.configure(
        processors=[*processors, renderer],
        context_class=cast(Any, partial(dict, instance=instance)),  # not contextvars: threads have none of them
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,  # a call below the level then costs a third
    )
    if libraries:
        named: list[Any] = [lambda _, __, event: event | {"instance": instance}, structlog.stdlib.add_logger_name]
        logging.lastResort = handler = logging.StreamHandler(stream)
        handler.setLevel(logging.WARNING)
        handler.setFormatter(structlog.stdlib.ProcessorFormatter(renderer, foreign_pre_chain=[*named, *processors]))


def get_logger() -> Any:
    return structlog.get_logger()


class Counter:
    """A growing number, safe from any thread."""

    def __init__(self) -> None:
        self._value = 0
        self._lock = threading.Lock()

    def add(self, count: int = 1) -> None:
        with self._lock:
            self._value += count

    @property
    def value(self) -> int:
        return self._value


@dataclass
class SpanRecorder:
    """Spans of a request on an instance, by the wall clock, for a common timeline of several instances."""

    instance: str
    spans: list[Span] = field(default_factory=list)
    _open: dict[str, tuple[float, float]] = field(default_factory=dict)  # by the wall clock, and by the monotonic one

    def start(self, stage: str) -> None:
        self._open.setdefault(stage, (time.time(), time.monotonic()))

    def open_s(self, stage: str) -> float:
        """Return the seconds since a stage began; 0 for a stage that is not open."""
        return time.monotonic() - self._open[stage][1] if stage in self._open else 0.0

    def end(self, *stages: str) -> None:
        for stage in stages:
            if stage in self._open:
                start_s, _ = self._open.pop(stage)
                self.spans.append(Span(stage, self.instance, start_s, time.time()))
