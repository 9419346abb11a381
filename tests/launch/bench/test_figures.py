"""Figures of a benchmark, recomputed by hand from times that are given."""

from __future__ import annotations

import itertools
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib import rc_context

from common.errors import TriptychError
from launch.bench.figures import Run, of_request, parse_objectives, statistics
from launch.bench.load import Level, repeat_jobs
from launch.bench.plot import check_plot, draw
from launch.bench.run import parse_extra, parse_levels
from launch.cli.client import ClientRequest, ClientResult

JOB = ClientRequest("a", "hello")


def result(began: float, first_s: float, last_s: float, tokens: int | None, error: str | None = None) -> ClientResult:
    times = {"ttft_s": first_s, "last_text_s": last_s, "latency_s": last_s + 0.001}
    return ClientResult(JOB, error=error, completion_tokens=tokens, began=began, **times)


def test_metrics_of_a_request_are_aiperfs() -> None:
    figures = of_request(result(5.0, 0.2, 1.0, 5))
    assert figures["time_to_first_token"] == pytest.approx(200)
    assert figures["request_latency"] == pytest.approx(1000)
    assert figures["inter_token_latency"] == pytest.approx(800 / 4)
    assert figures["output_token_throughput_per_user"] == pytest.approx(5)
    assert figures["output_tokens"] == 5


@pytest.mark.parametrize("tokens", [None, 0, 1])
def test_without_a_second_token_there_is_no_gap_between_tokens(tokens: int | None) -> None:
    assert of_request(result(0.0, 0.2, 1.0, tokens))["inter_token_latency"] is None


def test_throughput_and_goodput_count_the_answers_of_the_whole_run() -> None:
    results = [result(10.0, 0.1, 1.0, 10), result(11.0, 0.3, 2.999, 20), result(12.0, 9.0, 9.0, 1, error="HTTP 500")]
    run = Run("2 in flight", results, {"time_to_first_token": 200.0})
    figures = run.to_json()
    assert run.duration_s == pytest.approx(4.0)
    assert (figures["requests"], figures["failed"]) == (3, 1)
    assert figures["request_throughput"] == pytest.approx(2 / 4)
    assert figures["output_token_throughput"] == pytest.approx(30 / 4)
    assert figures["goodput"] == pytest.approx(1 / 4)
    assert figures["errors"] == {"HTTP 500": 1}
    assert [record["begin_s"] for record in figures["records"]] == [0.0, 1.0, 2.0]


def test_a_run_in_which_all_failed_has_no_figures_and_no_division_by_zero() -> None:
    figures = Run("1 in flight", [result(0.0, 0.1, 0.2, 1, error="no")], {"request_latency": 1.0}).to_json()
    assert (figures["request_throughput"], figures["goodput"], figures["duration_s"]) == (0.0, 0.0, 0.0)
    assert set(figures["metrics"]["request_latency"].values()) == {"ms", None}


def test_statistics_are_those_of_the_values() -> None:
    found = statistics([float(value) for value in range(1, 102)])
    assert found == {"avg": 51.0, "min": 1.0, "p50": 51.0, "p90": 91.0, "p99": 100.0, "max": 101.0}


def test_objectives_are_written_as_for_aiperf() -> None:
    text = "time_to_first_token:500 inter_token_latency:3.4"
    assert parse_objectives(text) == {"time_to_first_token": 500.0, "inter_token_latency": 3.4}
    assert parse_objectives("") == {}
    for wrong in ("ttft:5", "request_latency", "request_latency:-1", "request_latency:nan", "request_latency:inf"):
        with pytest.raises(TriptychError, match=f"goodput has '{wrong}': should be NAME:MILLISECONDS"):
            parse_objectives(wrong)


def test_levels_are_closed_or_open_and_never_both() -> None:
    assert parse_levels("", "", constant=False) == [Level(concurrency=1)]
    assert parse_levels("1,8", "", constant=False) == [Level(concurrency=1), Level(concurrency=8)]
    assert parse_levels("", "0.5,2", constant=True) == [Level(rate=0.5, constant=True), Level(rate=2.0, constant=True)]
    with pytest.raises(TriptychError, match="give one of them"):
        parse_levels("1", "1", constant=False)
    for wrong in ("0", "-1", "x", "1,,2", "99999"):
        with pytest.raises(TriptychError, match="should be positive numbers"):
            parse_levels(wrong, "", constant=False)
    for wrong in ("nan", "inf", "0"):
        with pytest.raises(TriptychError, match="should be positive numbers"):
            parse_levels("", wrong, constant=False)


def test_further_fields_are_a_json_object() -> None:
    assert parse_extra("") == {}
    assert parse_extra('{"ignore_eos": true}') == {"ignore_eos": True}
    for wrong in ("[1]", "{", "1"):
        with pytest.raises(TriptychError, match="extra"):
            parse_extra(wrong)


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    moments = Level(rate=4.0).arrivals(4001, random.Random(1))
    assert moments[0] == 0.0
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(1000, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03), "e^-1 of Poisson's gaps"
    assert Level(rate=4.0, constant=True).arrivals(3, random.Random(1)) == [0.0, 0.25, 0.5]
    assert Level(rate=4.0).arrivals(9, random.Random(7)) == Level(rate=4.0).arrivals(9, random.Random(7))


def test_jobs_take_turns_and_fresh_ones_differ() -> None:
    once = [JOB, ClientRequest("b", "world")]
    assert repeat_jobs(once, 3, fresh=False, seed=0) == [*once, JOB]
    fresh = repeat_jobs(once, 50, fresh=True, seed=0)
    assert len({job.prompt for job in fresh}) == 50
    assert fresh == repeat_jobs(once, 50, fresh=True, seed=0)


def test_the_plot_has_a_line_per_run_and_panel(tmp_path: Path) -> None:
    runs = [Run("<1> in flight", [result(0.0, 0.1, 0.5, 5)]), Run("all failed", [result(0.0, 1, 1, 1, error="no")])]
    file = tmp_path / "plot.svg"
    check_plot(file)
    with rc_context({"svg.fonttype": "none"}):  # text as text
        draw(runs, "model & url", file)
    root = ElementTree.parse(file).getroot()
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"<1> in flight", "all failed", "model & url", "request latency, ms"} <= {*texts}
    with pytest.raises(TriptychError, match=r"plot.txt should end with one of .*\.svg"):
        check_plot(tmp_path / "plot.txt")
