"""What the chart says of the program is true: settings, roles, metrics, paths, ports, image targets. Needs no Helm."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from common.config import EngineConfig, Settings
from common.http.auth import CONTROL_PATHS
from common.messages import Role
from launch.cluster.topology import LETTERS
from services.process.drain import ANSWER_S, NOTICE_S
from tools.kubernetes.matrix import MATRIX, REFUSED

ROOT = Path(__file__).parents[3]
CHART = ROOT / "launch" / "kubernetes" / "chart"
TEMPLATES = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def fields(prefix: str = "TRIPTYCH_") -> set[str]:
    engine = {f"{prefix}ENGINE__{name.upper()}" for name in EngineConfig.model_fields}
    return engine | {prefix + name.upper() for name in Settings.model_fields}


def settings_of(value: object) -> Iterator[dict[str, Any]]:
    """Every `settings` anywhere in values."""
    if isinstance(value, dict):
        if isinstance(value.get("settings"), dict):
            yield value["settings"]
        for inner in value.values():
            yield from settings_of(inner)


def test_the_charts_variables_are_settings() -> None:
    found = set(re.findall(r"\bTRIPTYCH_[A-Z_]+[A-Z]\b", TEMPLATES))
    assert "TRIPTYCH_BROKER" in found
    assert found <= fields()


def test_no_pod_gets_variables_of_services() -> None:
    """A release named triptych would have TRIPTYCH_BROKER_SERVICE_HOST, which is no setting: the program refuses it."""
    for path in sorted((CHART / "templates").iterdir()):
        pods = re.findall(r"^ +serviceAccountName:.*\n(?:.*\n)?.*", path.read_text(), re.M)
        assert all("enableServiceLinks: false" in pod for pod in pods), path.name


def test_every_pod_has_its_own_probes() -> None:
    """Where KubeRay finds none, it adds some that run wget: no pod of a slim image would ever be ready."""
    for path in sorted((CHART / "templates").iterdir()):
        text = path.read_text()
        num_pods = len(re.findall(r"^ +containers:", text, re.M))
        assert [text.count(probe) for probe in ("readinessProbe:", "livenessProbe:")] == [num_pods, num_pods], path.name


def test_settings_of_the_matrix_are_settings() -> None:
    given = [one for values in MATRIX.values() for one in settings_of(values)]
    assert given
    for one in given:
        Settings(**one)


def test_the_schema_refuses_the_settings_that_the_chart_gives() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = {one["required"][0] for one in schema["definitions"]["settings"]["not"]["anyOf"]}
    assert refused <= Settings.model_fields.keys()
    given = {name.removeprefix("TRIPTYCH_").lower() for name in re.findall(r"name: (TRIPTYCH_\w+)", TEMPLATES)}
    assert given - {"log_format", "metrics_without_key"} <= refused


def test_every_role_of_a_worker_has_values_and_a_letter_for_ray() -> None:
    roles = {role for role in get_args(Role) if role != "proxy"}
    assert set(VALUES["roles"]) == roles == set(LETTERS)
    letters = re.search(r"\$letters := dict (.*?) }}", TEMPLATES)
    assert letters
    words = re.findall(r'"(\w+)"', letters[1])
    assert dict(zip(words[::2], words[1::2], strict=True)) == LETTERS


def test_metrics_of_the_autoscalers_are_exported() -> None:
    found = set(re.findall(r"triptych_\w+_seconds", TEMPLATES))
    recorded = json.loads((ROOT / "tests" / "goldens" / "metrics.json").read_text())
    assert found == {"triptych_outstanding_work_seconds", "triptych_proxy_outstanding_work_seconds"}
    assert found <= set(recorded)


def test_ports_and_images_are_those_of_the_dockerfile() -> None:
    text = (ROOT / "Dockerfile").read_text()
    exposed = set(re.findall(r"^EXPOSE (\d+)", text, re.M))
    assert set(re.findall(r"containerPort: (\d+)", TEMPLATES)) == exposed
    assert {"broker", "proxy", "worker"} <= set(re.findall(r"AS (\w+)$", text, re.M))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert "EXTRAS" in text, "Ray's image is built by it"


def test_the_page_tells_how_the_image_for_gpus_is_made() -> None:
    overlay = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
    assert overlay["services"]["encoder"]["image"].endswith(VALUES["image"]["gpuSuffix"])
    page = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text()
    assert re.search(r"^TRIPTYCH_TAG=\S+ docker compose .*-f docker-compose\.gpu\.yml build encoder$", page, re.M)


def test_the_last_command_has_its_time_before_the_pod_is_killed() -> None:
    """Longest life of a request < wait of the command < grace of the pod."""
    assert "/drain" in CONTROL_PATHS
    default = int(Settings.model_fields["request_timeout_s"].default)
    assert f"request_timeout_s | default {default}" in TEMPLATES
    wait = re.search(r"common\.http\.drain, \{\{ add \$timeout (\d+)", TEMPLATES)
    grace = re.search(r"terminationGracePeriodSeconds: \{\{ add \$timeout (\d+)", TEMPLATES)
    assert wait
    assert grace
    assert NOTICE_S + ANSWER_S < int(wait[1]) < int(grace[1])


@pytest.mark.parametrize("name", [*MATRIX, *REFUSED])
def test_values_of_the_matrix_have_keys_of_the_chart(name: str) -> None:
    values = MATRIX.get(name) or REFUSED.get(name, ({}, ""))[0]
    assert set(values) <= set(VALUES)
