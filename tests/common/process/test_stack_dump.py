"""SIGUSR1 writes all stacks to the log of a process, which goes on."""

from __future__ import annotations

import signal
import subprocess
import sys

CODE = """
import asyncio, threading
from common.process.stack_dump import dump_on_signal

async def outer():
    async for _ in between():
        pass

async def between():
    yield await inner()

async def inner():
    await asyncio.get_running_loop().run_in_executor(None, input)  # a thread that waits for a line

async def main():
    task = asyncio.create_task(outer(), name="the waiting one")
    await asyncio.sleep(0.1)
    print("ready", flush=True)
    await task
    print("went on")

dump_on_signal()
asyncio.run(main())
"""


def test_threads_and_tasks_are_written_and_the_process_goes_on() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    stacks = ""
    while "in inner" not in stacks:
        stacks += process.stderr.readline()
    answer, _ = process.communicate("a line\n", timeout=30)
    assert answer == "went on\n"
    assert process.returncode == 0
    assert stacks.count("(most recent call first)") >= 2, "the main thread and the helper"
    waiting = stacks.split("Task the waiting one")[1]
    assert waiting.index("in outer") < waiting.index("in between") < waiting.index("in inner")
