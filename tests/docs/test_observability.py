"""The board and the alerts of docs/observability use names that exist, in expressions that Prometheus takes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import debian

DOCS = Path(__file__).parents[2] / "docs"
BOARD, ALERTS = DOCS / "observability" / "grafana.json", DOCS / "observability" / "alerts.yaml"
OPENAPI = Path(__file__).parents[1] / "goldens" / "openapi.json"
ROW = re.compile(r"^\| `([a-z_:]+)` \| (counter|gauge|histogram) \|", re.MULTILINE)


def known_names() -> set[str]:
    """Names as Prometheus stores them, by the reference page; another test keeps its tables current."""
    rows = ROW.findall((DOCS / "reference" / "metrics.md").read_text())
    parts = {f"{name}_{part}" for name, kind in rows if kind == "histogram" for part in ("bucket", "sum", "count")}
    return {name for name, kind in rows if kind != "histogram"} | parts | {"triptych_up"}


def panels() -> list[dict[str, Any]]:
    return json.loads(BOARD.read_text())["panels"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in rules()]


def test_every_name_exists() -> None:
    used = {name for expression in expressions() for name in re.findall(r"\b(?:triptych_|vllm:)[a-z_:]+", expression)}
    assert len(used) > 20
    assert used - known_names() == set()


def test_panels_do_not_overlap_and_each_has_a_title_a_unit_and_a_source() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels()}) == len(places)
    for panel in panels():
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${source}"


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_requests_are_those_that_generate_and_no_probes() -> None:
    paths = json.loads(OPENAPI.read_text())["paths"]
    generate = {path for path, methods in paths.items() if path.startswith("/v1/") and "post" in methods}
    counts = [part for expression in expressions() for part in re.findall(r"proxy_requests_total(\S*)", expression)]
    assert len(counts) == 3
    for part in counts:
        found = re.search(r'endpoint=~"([^"]+)"', part)
        assert found, part
        assert {path for path in paths if re.fullmatch(found[1], path)} == generate


PROXY_WORKERS = 'triptych_proxy_workers{instance="proxy", role="%s"}'
GONE = [
    ("TriptychInstanceSilent", {'triptych_up{instance="pd0", role="prefill_decode"}': "1x3 0x10"}),
    ("TriptychInstanceSilent", {'up{job="triptych", instance="pd0", role="prefill_decode"}': "1x3 0x10"}),
    ("TriptychWorkersLost", {PROXY_WORKERS % "encoder": "2x3 1x10"}),
    ("TriptychNoWorkers", {PROXY_WORKERS % "decode": "0x13", PROXY_WORKERS % "encoder": "1x13"}),
    ("TriptychBrokerDown", {'triptych_proxy_broker_up{instance="proxy"}': "1x3 0x10"}),
]
"""What is gone: the alert, and the series of 14 minutes that are left then."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_alerts_fire_where_something_is_gone(tmp_path: Path) -> None:
    tool = debian.program_or_skip("prometheus", "usr/bin/promtool")
    queries = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
                    "eval_time": "13m",
                    "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}],
                }
            ],
        }
        for alert, series in GONE
    ]
    tests = tmp_path / "tests.yaml"
    tests.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": queries}))
    result = subprocess.run([str(tool), "test", "rules", str(tests)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prometheus_takes_the_alerts_and_the_boards_expressions(tmp_path: Path) -> None:
    tool = debian.program_or_skip("prometheus", "usr/bin/promtool")
    queries = [target["expr"].replace("$__rate_interval", "5m") for panel in panels() for target in panel["targets"]]
    board = tmp_path / "board.yaml"
    recorded = [{"record": f"board:{number}", "expr": query} for number, query in enumerate(queries)]
    board.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": recorded}]}))
    for file in (ALERTS, board):
        result = subprocess.run([str(tool), "check", "rules", str(file)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
