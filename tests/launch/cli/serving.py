"""A `triptych serve` of its own process, as a person starts it, with a temporary folder that can be looked into."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from common.process.ports import free_port
from tests.launch.waiting import alive, eventually
from tools.soak.memory import descendants

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 150.0


class Serving:
    """The process, its output so far, and what it started."""

    def __init__(self, folder: Path, *arguments: str, cwd: Path | None = None) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._log = folder / "serve.log"
        self.port = free_port("127.0.0.1")
        # As the installed script runs it: without the working directory on its path.
        command = [sys.executable, "-P", "-m", "triptych", "serve", *arguments, "--port", str(self.port)]
        environment = os.environ | {"TMPDIR": str(self.temporary), "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=cwd)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_until(self, text: str, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait for a text in the output; fail at once if the process ends instead."""

        def said() -> bool:
            if text in self.output:
                return True
            assert self.process.poll() is None, f"ended instead of saying {text!r}:\n{self.output}"
            return False

        return eventually(said, timeout_s, f"{text!r} in:\n{self.output}")

    def pid_of(self, instance_id: str) -> int:
        """The process of an instance, from the last table row or message that names it."""
        found = re.findall(rf"^{instance_id} +\w+ +(\d+) |{instance_id} is back \(pid (\d+)", self.output, re.MULTILINE)
        return int(next(pid for pid in found[-1] if pid))

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """The end of a test, whatever happened in it."""
        below = descendants(self.process.pid)
        self.process.kill()
        self.process.wait(10)
        for pid in below:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
