"""Child processes: logs, ends, groups, and the lifeline to the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import TriptychError
from launch.cluster.children import Child, Command, describe_exit
from tests.launch.waiting import alive, eventually

_FOLLOWER = """
import sys, threading
from launch.cluster.children import follow_parent
follow_parent()
print("following", flush=True)
threading.Event().wait(60)
"""
_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _FOLLOWER


def command(code: str, log: Path) -> Command:
    return Command([sys.executable, "-c", code], dict(os.environ), log)


async def test_output_goes_to_the_log_and_the_end_is_described(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = await Child.start(command("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", log))
    assert await child.wait() == "exit code 3"
    assert not child.running
    assert set(child.log_tail().splitlines()) == {"out", "err"}


async def test_a_child_starts_after_the_folder_of_its_log_was_tidied_away(tmp_path: Path) -> None:
    log = tmp_path / "triptych-logs-0" / "log"
    assert await (await Child.start(command("print('out')", log))).wait() == "exit code 0"
    assert (log.read_text(), log.parent.stat().st_mode & 0o777) == ("out\n", 0o700)


async def test_a_child_that_is_killed_twice_is_told_of_as_killed(tmp_path: Path) -> None:
    """A signal by the process object looks first whether the process has ended: what it finds, nobody else finds."""
    child = await Child.start(command("input()", tmp_path / "log"))
    looked = list[str]()
    for name in ("kill", "terminate", "send_signal"):
        setattr(child._process, name, lambda *_, name=name: looked.append(name))
    child.kill()
    child.kill()
    child.terminate()
    assert (await child.wait(), looked) == ("killed by SIGKILL", [])
    child.kill()  # nobody is there any more


async def test_a_killed_child_takes_what_it_started_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import subprocess, sys; helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(helper.pid, flush=True); helper.wait()"
    )
    child = await Child.start(command(code, log))
    eventually(lambda: log.read_text().strip(), 20, "the helper's pid")
    helper = int(log.read_text())
    child.kill()
    assert await child.wait() == "killed by SIGKILL"
    eventually(lambda: not alive(helper), 5, "the end of the helper")


async def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TriptychError, match="cannot start /no/such/program"):
        await Child.start(Command(["/no/such/program"], {}, tmp_path / "log"))


@pytest.mark.parametrize("code", [_FOLLOWER, _STUBBORN], ids=["willing", "ignores SIGTERM"])
def test_a_child_ends_with_its_parent_even_after_sigkill(code: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = (
        "import asyncio, os, sys, pathlib\n"
        "from launch.cluster.children import Child, Command\n"
        "async def main():\n"
        f"    child = await Child.start(Command([sys.executable, '-c', {code!r}], dict(os.environ), "
        f"pathlib.Path({str(log)!r})))\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        eventually(lambda: "following" in log.read_text(), 20, "the child's start")
        process.send_signal(signal.SIGKILL)
        eventually(lambda: not alive(pid), 20, "the end of the child")


def test_exit_codes_in_words() -> None:
    assert [describe_exit(code) for code in (0, 2, -9, -15)] == [
        "exit code 0",
        "exit code 2",
        "killed by SIGKILL",
        "killed by SIGTERM",
    ]


async def test_only_the_end_of_a_log_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(100_000)))
    child = await Child.start(command("", log))
    await child.wait()
    assert child.log_tail().splitlines() == [f"line {i}" for i in range(99_985, 100_000)]
    log.write_text("x" * 100_000)
    assert len(child.log_tail()) == 2**14
    log.unlink()
    assert child.log_tail() == ""
