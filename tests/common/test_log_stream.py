"""Logs that cannot be written are lost, and nothing else is; each line says whose it is."""

from __future__ import annotations

import json
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


THREAD = """
import threading
from common.telemetry import get_logger, setup_logging
setup_logging("info", "json", "pd0")
thread = threading.Thread(target=lambda: get_logger().warning("the engine refused a command", error="why"))
thread.start()
thread.join()
"""


def test_lines_of_other_threads_name_the_instance() -> None:
    done = subprocess.run([sys.executable, "-c", THREAD], stderr=subprocess.PIPE, text=True, timeout=60)
    [line] = done.stderr.splitlines()
    assert json.loads(line).items() >= {"instance": "pd0", "error": "why"}.items()


LIBRARIES = """
import logging
from common.telemetry import setup_logging
setup_logging("info", "json", "pd0")
log = logging.getLogger("uvicorn.error")
log.info("Started server process")
log.warning("%s requests", 3)
try:
    1 / 0
except ArithmeticError:
    log.exception("Exception in ASGI application")
"""


def test_warnings_of_libraries_are_lines_of_the_same_form() -> None:
    done = subprocess.run([sys.executable, "-c", LIBRARIES], stderr=subprocess.PIPE, text=True, timeout=60)
    warning, error = map(json.loads, done.stderr.splitlines())
    assert {(line["instance"], line["logger"]) for line in (warning, error)} == {("pd0", "uvicorn.error")}
    assert (warning["level"], warning["event"]) == ("warning", "3 requests")
    assert (error["level"], error["event"]) == ("error", "Exception in ASGI application")
    assert "ZeroDivisionError" in error["exception"]
    assert warning["timestamp"] <= error["timestamp"]
