"""What a GPU check has measured becomes a section of the page of benchmarks."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tools.gpu_check.figures import duration, failure, rate
from tools.gpu_check.layout import ROOT
from tools.gpu_check.report import BEGIN, END, main, section, write_into

COPY = rate("limits", "copy", "GB/s", [1.0], 3000.0)
NEAR, FAR = duration("decode", "batch 1", [0.002], 0.0019), duration("decode", "batch 64", [0.004], 0.002)
BROKEN = failure("decode", "batch 256", RuntimeError("no room"))


def check(*figures: Any, when: str = "2026-11-22T09:00:00+00:00") -> dict[str, Any]:
    found = {"stage": "environment", "verdict": "ok", "decides": True, "found": "an H100, driver 580", "figures": []}
    bench = {"stage": "bench-decode", "verdict": "ok", "decides": False, "found": "", "figures": []}
    return {"when": when, "stages": [found, {**bench, "figures": [asdict(figure) for figure in figures]}]}


def test_it_has_the_date_the_hardware_and_every_figure_with_its_gap() -> None:
    lines = section([check(COPY, NEAR, FAR, BROKEN)], {}).splitlines()
    assert lines[0] == (
        "Measured on 2026-11-22: an H100, driver 580. Checked: `environment` ok. "
        "Its limits, measured in the same run: copy: 3000 GB/s."
    )
    rows = [line for line in lines if line.startswith("| batch")]
    assert rows == [
        "| batch 1 | 2 ms | 2–2 | 1.9 ms | 95% | – | – |",
        "| batch 64 | 4 ms | 4–4 | 2 ms | 50% | – | open |",
        "| batch 256 | failed | – | – | – | RuntimeError: no room | – |",
    ]
    header = next(line for line in lines if line.startswith("| case"))
    assert {row.count("|") for row in rows} == {header.count("|")}


def test_a_figure_says_whether_its_goal_is_reached_and_none_without_a_limit_hides_its_gap() -> None:
    goals = [duration("decode", f"batch {n}", [0.002], limit_s, goal=0.8) for n, limit_s in ((1, 0.0016), (8, 0.0015))]
    unlimited = rate("batching", "64 requests", "tokens/s", [1.0], 5000.0)
    assert [figure.reached for figure in (*goals, unlimited)] == [True, False, None]
    lines = section([check(*goals, unlimited)], {}).splitlines()
    assert "| batch 1 | 2 ms | 2–2 | 1.6 ms | 80%, goal 80% reached | – | open |" in lines
    assert "| batch 8 | 2 ms | 2–2 | 1.5 ms | 75%, goal 80% missed | – | open |" in lines
    assert "| 64 requests | 5000 tokens/s | 5000–5000 | – | – | – | open |" in lines


def test_what_was_measured_on_a_fallback_says_so() -> None:
    right, wrong = replace(NEAR, attention="flashinfer"), replace(FAR, attention="torch", is_fallback=True)
    lines = section([check(right, wrong)], {}).splitlines()
    assert "| batch 1 | 2 ms | 2–2 | 1.9 ms | 95% | attention by flashinfer | – |" in lines
    assert "| batch 64 | 4 ms | 4–4 | 2 ms | 50% | attention by torch, A FALLBACK | open |" in lines
    warning = "**Measured on a fallback**, because what should have computed did not run: `decode`."
    assert lines[2] == warning
    assert warning not in section([check(right)], {})


def test_a_later_call_adds_to_it_and_no_failure_hides_a_number() -> None:
    broken = failure("decode", "batch 1", RuntimeError("no room"))
    later = check(broken, duration("decode", "batch 8", [0.003], 0.0029), when="2026-11-23T09:00:00+00:00")
    written = section([check(NEAR), later], {"decode, batch 8": "sampling is outside of the graph"})
    assert "| batch 1 | 2 ms |" in written
    assert "| sampling is outside of the graph |" in written
    assert "2026-11-22" in written
    assert "2026-11-23" in written


def test_it_is_written_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    source, page = tmp_path / "gpu-check.json", tmp_path / "page.md"
    source.write_text(json.dumps(check(NEAR)))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main([str(source), "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "an H100" in text
    assert "old" not in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no lines"):
        write_into(page, "text")


def test_the_page_has_the_marks() -> None:
    text = (ROOT / "docs" / "lab" / "benchmarks.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index(BEGIN) < text.index(END)
