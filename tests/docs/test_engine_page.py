"""The example of docs/design/engine.md runs as it stands, in the root of the repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "engine.md"


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None
    monkeypatch.chdir(ROOT)
    exec(compile(example[1], str(PAGE), "exec"), {})
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:2] in ("0 ", "1 ", "2 ")]
    assert len(lines) == 3 + 2 + 1
    assert lines[-1].split()[1] in ("red", "green", "blue")
