"""Signals that ask a process to end, and the one that nohup keeps away."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CODE = """
import asyncio
import signal
from common.process.end_signals import on_end_signal

async def main():
    stop = asyncio.Event()
    on_end_signal(stop.set)
    print("deaf" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else "listens", flush=True)
    await stop.wait()
    print("stopped")

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("prefix", "hears", "number"),
    [
        ([], "listens", signal.SIGINT),
        ([], "listens", signal.SIGTERM),
        ([], "listens", signal.SIGHUP),
        (["nohup"], "deaf", signal.SIGTERM),
    ],
)
def test_a_process_stops_cleanly_by_each_but_not_by_a_closed_terminal_under_nohup(
    prefix: list[str], hears: str, number: signal.Signals
) -> None:
    heard = "import signal, os, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
    own = [sys.executable, "-c", heard]  # whether or not the tests themselves run under nohup
    command = [*own, *prefix, sys.executable, "-c", CODE]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{hears}\n"
            process.send_signal(number)
            assert (process.stdout.read(), process.wait(20)) == ("stopped\n", 0)
        finally:
            process.kill()
