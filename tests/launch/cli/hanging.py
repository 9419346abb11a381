"""The command line with an engine that can be made to hang: `python -m tests.launch.cli.hanging worker …`.

SIGUSR2 makes the decoder's next step wait for ever, as a lost GPU or a deadlock would.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from engine.core.decoder_engine import DecoderEngine
from engine.state.events import Event
from launch.cli.app import main
from launch.cluster.instance import Instance
from launch.cluster.plan import Plan


class HangingPlan(Plan):
    """A plan whose workers run with this module."""

    def instances(self, broker_url: str, logs: Path) -> list[Instance]:
        instances = super().instances(broker_url, logs)
        for instance in instances:
            if instance.role != "proxy":
                argv = instance.command.argv
                argv[argv.index("triptych")] = __name__
        return instances


def _run() -> None:
    hangs, never = threading.Event(), threading.Event()
    step = DecoderEngine.step

    def step_or_hang(engine: DecoderEngine) -> list[Event]:
        if hangs.is_set():
            never.wait()
        return step(engine)

    DecoderEngine.step = step_or_hang  # type: ignore[method-assign,assignment]
    signal.signal(signal.SIGUSR2, lambda *_: hangs.set())
    main()


if __name__ == "__main__":
    _run()
