"""What `serve` says may get lost; that nobody reads it costs the cluster nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

import pytest

SAYS = """
import sys
from pathlib import Path
from launch.cli.console import ConsoleReporter, make_console
from launch.cli.serve import _stdout
if sys.argv[1] == "closed":
    sys.stdout.close()
with _stdout() as out:
    console = make_console(out)
    reporter = ConsoleReporter(console, "1e1pd")
    for number in range(int(sys.argv[2])):
        reporter.event("e0 died", good=False, log_tail="last line", then="starting it again in 0.1 s")
    console.print("✓ done · so")
print("went on", file=sys.stderr)
"""


def say(stream: str, out: IO[bytes] | int, lives: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SAYS, stream, str(lives)]
    env = os.environ | {"PYTHONUTF8": "0"} | environment
    return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, env=env, check=False)


@pytest.mark.parametrize("stream", ["full", "unread", "stalled", "closed"])
def test_a_cluster_goes_on_where_nobody_reads_what_it_says(stream: str) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as pipe, open("/dev/full", "wb") as full:
        if stream == "unread":
            os.close(reader)
        done = say(stream, full if stream == "full" else pipe, lives=1000)  # many times what a pipe takes
        if stream != "unread":
            os.close(reader)
    assert (done.returncode, done.stderr) == (0, "went on\n")


@pytest.mark.parametrize(("encoding", "last"), [("utf-8", "✓ done · so"), ("ascii", "? done ? so")])
def test_all_is_said_in_order_and_what_an_encoding_cannot_say_is_marked(encoding: str, last: str) -> None:
    done = say("read", subprocess.PIPE, lives=50, PYTHONIOENCODING=encoding)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * 50 + 1
    assert lines[1] == "    last line"
    assert lines[-1] == last.encode(encoding).decode(encoding)
