"""A stage of the GPU check: a command with a deadline, and how to read what came of it. Standard library alone."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from xml.etree import ElementTree

from tools.gpu_check.hosted import Host, end_group
from tools.gpu_check.layout import ROOT

REPORT: Final = "{report}"
"""In a command: the file that it writes its report to."""
MODELS: Final = "TRIPTYCH_GPU_MODELS"
"""The variable that names the folder of real checkpoints."""
_REPORT_S: Final = 5.0
_SHOWN_FAILURES: Final = 5
_TAIL_CHARACTERS: Final = 300

Verdict = Literal["ok", "FAILED", "timed out", "no time left", "not here"]


@dataclass(frozen=True)
class Finding:
    """What a report says: in words, in figures, and whether it says that all is well."""

    is_good: bool
    words: str
    figures: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Stage:
    """`expected_s` is how long it takes, `limit_s` its deadline. With `decides`, the check fails if the stage does, and
    others run beside it; a benchmark does not decide, and runs alone.

    With a `host`, the words of a command, `command` is told to the one process of that command which all such stages
    share (`tools.gpu_check.hosted`).

    `missing`, of the variables, says why the stage cannot run on this machine and need not; so does a line of its log
    with one of `refusals`. `variables` are its own beside those of all stages.
    """

    name: str
    command: Sequence[str]
    expected_s: float
    limit_s: float
    read: Callable[[Path], Finding]
    decides: bool = True
    missing: Callable[[Mapping[str, str]], str | None] = lambda _: None
    variables: Mapping[str, str] = field(default_factory=dict)
    refusals: Sequence[str] = ()
    host: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a stage; `log` is the file of what it printed."""

    stage: str
    verdict: Verdict
    seconds: float
    expected_s: float
    limit_s: float
    found: str
    decides: bool
    log: str
    figures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def was_cut_short(self) -> bool:
        """Whether it might have come to its end, had the whole check had more time."""
        return self.verdict == "no time left" or (self.verdict == "timed out" and self.seconds < self.limit_s)

    @property
    def fails_the_check(self) -> bool:
        return self.decides and self.verdict not in ("ok", "not here")


def run_stage(
    stage: Stage, environment: Mapping[str, str], folder: Path, left_s: float, host: Host | None = None
) -> Outcome:
    """Run one stage for at most its own limit and `left_s`; `folder` gets its log and its report. `host` is that of the
    stage, where it has one.

    Whatever it started is dead when this returns, unless the host did: then it is when that is closed.
    """
    log, report = folder / f"{stage.name}.log", folder / f"{stage.name}.report"
    began_s = time.monotonic()

    def outcome(verdict: Verdict, found: str, figures: list[dict[str, Any]] | None = None) -> Outcome:
        seconds = time.monotonic() - began_s
        return Outcome(
            stage.name, verdict, seconds, stage.expected_s, stage.limit_s, found, stage.decides, log.name, figures or []
        )

    missing = stage.missing(environment)
    if missing is not None:
        return outcome("not here", missing)
    if left_s <= 0:
        return outcome("no time left", f"run it again with --only {stage.name}, or raise --budget-s")
    command = [word.replace(REPORT, str(report)) for word in stage.command]
    report.unlink(missing_ok=True)
    limit_s = min(stage.limit_s, left_s)
    if host is not None:
        status = host.run(command, log, limit_s)
    else:
        status = _run(command, {**environment, **stage.variables}, log, limit_s)
    refusal = _refusal(stage, log)
    if refusal is not None:
        return outcome("not here", refusal)
    try:
        finding = stage.read(report)
    except (OSError, ValueError, KeyError, TypeError, ElementTree.ParseError):
        finding = Finding(False, f"no report; the log ends: {_tail(log)}")
    if status is None:
        return outcome("timed out", f"after {limit_s:.0f} s; {finding.words}", finding.figures)
    return outcome("ok" if status == 0 and finding.is_good else "FAILED", finding.words, finding.figures)


def read_json(report: Path) -> Finding:
    """Of a script that writes `found`, and `figures` if it has some."""
    content = json.loads(report.read_text())
    return Finding(True, str(content["found"]), list(content.get("figures", ())))


def read_junit(report: Path) -> Finding:
    """Of pytest with `--junitxml`. That nothing ran is not good: then nothing was checked. A test
    that was interrupted has no name there."""
    cases = [case for case in ElementTree.parse(report).getroot().iter("testcase") if _name(case)]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    words = f"{passed} passed"
    if failed:
        more = f" and {len(failed) - _SHOWN_FAILURES} more" if len(failed) > _SHOWN_FAILURES else ""
        words += f", {len(failed)} failed: {', '.join(map(_name, failed[:_SHOWN_FAILURES]))}{more}"
    if skipped:
        reasons = sorted({_reason(case) for case in skipped})
        words += f", {len(skipped)} skipped: {'; '.join(reasons[:_SHOWN_FAILURES])}"
    return Finding(passed > 0 and not failed, words)


def _run(command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> int | None:
    """The exit status; None if the time was up."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _interrupt(process)
            return None
        finally:
            end_group(process)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does: pytest then writes the report of the tests that were through."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REPORT_S)


def _refusal(stage: Stage, log: Path) -> str | None:
    """The line of a log in which a tool refuses the device."""
    lines = log.read_text(errors="replace").splitlines() if stage.refusals else []
    return next((line.strip("= ") for line in lines if any(words in line for words in stage.refusals)), None)


def _name(case: ElementTree.Element) -> str:
    return case.get("name", "")


def _reason(case: ElementTree.Element) -> str:
    skipped = case.find("skipped")
    return str(skipped.get("message")) if skipped is not None else ""


def _tail(log: Path) -> str:
    """The end of a log on one line, as a cell of a table wants it."""
    return " ".join(log.read_text(errors="replace")[-_TAIL_CHARACTERS:].split())
