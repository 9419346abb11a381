"""docs/how-to/cuda.md names the benchmarks and settings of the code."""

from __future__ import annotations

import re
from pathlib import Path

from common.config import EngineConfig
from tools.bench.gpu.__main__ import BENCHMARKS, LOADS

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "cuda.md").read_text()


def first_cells(header: str) -> list[str]:
    """The names in the first column of the table that begins with `header`."""
    table = PAGE[PAGE.index(header) :].partition("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w…-]+)`", row.split("|")[1])]


def test_every_benchmark_is_on_the_page() -> None:
    assert first_cells("| benchmark |") == [*BENCHMARKS, *LOADS]


def test_the_settings_of_the_page_exist() -> None:
    settings = [name for name in first_cells("| setting |") if not name.startswith("--")]
    assert len(settings) >= 4
    assert set(settings) <= set(EngineConfig.model_fields)
