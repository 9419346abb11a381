"""The example of docs/design/engine.md runs as it stands, on a freshly drawn sign."""

import random
import re
from pathlib import Path

import pytest

from launch.demo import scenes

PAGE = Path(__file__).parents[2] / "docs" / "design" / "engine.md"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None
    scenes.render(random.Random(3), scenes.SIZES[0], "test").image.save(tmp_path / "sign.png")
    monkeypatch.chdir(tmp_path)
    exec(compile(example[1], str(PAGE), "exec"), {})
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:2] in ("0 ", "1 ", "2 ")]
    assert len(lines) == 3 + 2 + 1
    assert lines[-1].split()[1] in ("red", "green", "blue")
