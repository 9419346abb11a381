"""docs/how-to/cuda.md names the stages, benchmarks and settings that there are."""

from __future__ import annotations

import re
from pathlib import Path

from common.config import EngineConfig
from tools.bench_gpu.__main__ import NAMES
from tools.gpu_check import plan
from tools.gpu_check.plan import STAGES

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "cuda.md").read_text()


def first_cells(header: str) -> list[str]:
    """The names in the first column of the table that begins with `header`."""
    table = PAGE[PAGE.index(header) :].partition("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w…-]+)`", row.split("|")[1])]


def test_every_stage_of_the_check_is_on_the_page() -> None:
    benchmarks = [stage.name for stage in STAGES if stage.name.startswith("bench-")]
    others = [stage.name for stage in STAGES if stage.name not in benchmarks]
    assert first_cells("| stage |") == [*others, "bench-…"]
    assert benchmarks == [f"bench-{name}" for name in NAMES]


def test_the_expected_seconds_are_those_of_the_plan() -> None:
    table = PAGE[PAGE.index("| stage |") :].partition("\n\n")[0]
    told = {row.split("|")[1].strip(" `"): row.split("|")[3].strip() for row in table.splitlines()[2:]}
    benchmarks = [stage for stage in STAGES if not stage.decides]
    shown = ", ".join(f"{stage.name.removeprefix('bench-')} {stage.expected_s:g}" for stage in benchmarks)
    deciding = {stage.name: f"{stage.expected_s:g}" for stage in STAGES if stage.decides}
    assert told == {**deciding, "bench-…": shown}
    without = [stage for stage in STAGES if stage.name not in plan.OF_MODELS]
    whole_s, part_s = (plan.INSTALL_S + plan.expected_s(stages) for stages in (STAGES, without))
    assert f"{whole_s:.0f} of its {plan.BUDGET_S:.0f} s by estimate" in PAGE
    assert f"{part_s:.0f} s without checkpoints" in PAGE


def test_every_benchmark_is_on_the_page() -> None:
    assert first_cells("| benchmark |") == list(NAMES)


def test_the_settings_of_the_page_exist() -> None:
    settings = [name for name in first_cells("| setting |") if not name.startswith("--")]
    assert len(settings) >= 4
    assert set(settings) <= set(EngineConfig.model_fields)
