"""Logs that cannot be written are lost, and nothing else is."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOGS = """
import os, sys
from common.telemetry import get_logger, setup_logging
setup_logging("info", sys.argv[1], "pd0")
for number in range(3):
    get_logger().info("something", number=number)
if sys.argv[2] == "closed":
    sys.stderr.close()
    get_logger().error("more")
print("went on")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("fmt", ["json", "console"])
@pytest.mark.parametrize("stream", ["full", "closed"])
def test_a_process_goes_on_where_its_log_cannot_be_written(fmt: str, stream: str) -> None:
    with open("/dev/full" if stream == "full" else "/dev/null", "w") as log:
        done = subprocess.run(
            [sys.executable, "-c", LOGS, fmt, stream], stdout=subprocess.PIPE, stderr=log, text=True, timeout=60
        )
    assert done.stdout.split("\n")[-2] == "went on"
