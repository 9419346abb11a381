"""Logs and clocks, the same in every process."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import structlog

from common.messages import Span


def setup_logging(level: str, fmt: str, instance: str) -> None:
    """Structured logs on stderr, every line with the instance that wrote it."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if fmt == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(instance=instance)


def get_logger() -> Any:
    return structlog.get_logger()


class SpanRecorder:
    """The spans of one request on one instance. Wall clock, so that instances can be drawn on one line."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.spans: list[Span] = []
        self._open: dict[str, float] = {}

    def start(self, stage: str) -> None:
        self._open.setdefault(stage, time.time())

    def open_s(self, stage: str) -> float:
        """For how long a stage has been going on; 0 where it is not."""
        start_s = self._open.get(stage)
        return 0.0 if start_s is None else time.time() - start_s

    def end(self, stage: str) -> None:
        start_s = self._open.pop(stage, None)
        if start_s is not None:
            self.spans.append(Span(stage, self.instance, start_s, time.time()))
