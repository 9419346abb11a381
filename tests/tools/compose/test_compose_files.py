"""The container files agree with each other, with the settings and with their documentation. Needs no Docker."""

from __future__ import annotations

import hashlib
import re
import subprocess
import threading
import tomllib
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from common.config import EngineConfig, Settings
from common.http import drain

ROOT = Path(__file__).parents[3]
FILES = ("docker-compose.yml", "docker-compose.gpu.yml")
STACK = "docker-compose.stack.yml"
WORKERS = ("prefill-decode", "prefill", "decode", "encoder")
SERVICES = ("broker", *WORKERS, "proxy")
TARGETS = ("broker", "proxy", "worker")
KERNEL_FAILS = 'case "$*" in *kernels*) exit 1 ;; esac; echo 13.0'


class Loader(yaml.SafeLoader):
    """Knows the tags by which a file takes back what an earlier one says."""


Loader.add_constructor("!reset", lambda loader, node: None)
Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node, deep=True))


@cache
def compose(name: str = FILES[0]) -> dict[str, Any]:
    content = yaml.load((ROOT / name).read_text(), Loader)
    assert isinstance(content, dict)
    return content


def service(name: str) -> dict[str, Any]:
    found = compose()["services"][name]
    assert isinstance(found, dict)
    return found


@cache
def stages() -> dict[str, list[str]]:
    """Stage name to its lines, continued lines joined; the first line is its FROM."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            found[match[2]] = current = [line]
        elif found and line.strip() and not line.startswith("#"):
            current.append(line)
    return found


def ancestry(target: str) -> set[str]:
    """The stages of which `target` holds anything: what it starts from and copies from, all the way down."""
    names, waiting = set[str](), [target]
    while waiting:
        name = waiting.pop()
        if name in stages() and name not in names:
            names.add(name)
            waiting += re.findall(r"^(?:FROM |COPY --from=)(\S+)", "\n".join(stages()[name]), re.M)
    return names


def variables() -> set[str]:
    """Every variable that a person may set: interpolated, or passed on where it is set."""
    found = set[str]()
    for name in FILES:
        found |= set(re.findall(r"\$\{(\w+)", (ROOT / name).read_text()))
        for part in compose(name).get("services", {}).values():
            passed = {**(part.get("environment") or {}), **((part.get("build") or {}).get("args") or {})}
            found |= {variable for variable, value in passed.items() if value is None}
    return found


def test_compose_file_has_a_service_for_every_role() -> None:
    assert set(compose()["services"]) == set(SERVICES)
    roles = {service(name)["command"][2].replace("_", "-"): name for name in WORKERS}
    assert roles == {name: name for name in WORKERS}


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_checked_restarted_and_confined(name: str) -> None:
    settings = service(name)
    assert settings["healthcheck"]["test"][0] == "CMD"
    assert settings["restart"] == "unless-stopped"
    assert int(settings["user"].split(":")[0]) > 0
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]


def test_services_start_in_order_of_health() -> None:
    healthy = {"condition": "service_healthy"}
    assert "depends_on" not in service("broker")
    assert all(service(name)["depends_on"] == {"broker": healthy} for name in WORKERS)
    assert service("proxy")["depends_on"] == dict.fromkeys(("broker", *WORKERS), healthy)


@pytest.mark.parametrize("name", WORKERS)
def test_workers_can_be_scaled(name: str) -> None:
    settings = service(name)
    assert not {"container_name", "hostname", "ports"} & settings.keys()
    assert "TRIPTYCH_INSTANCE_ID" not in settings["environment"]
    usual = 0 if name in ("prefill", "decode") else 1
    variable = f"TRIPTYCH_{name.replace('-', '_').upper()}S"
    assert settings["deploy"]["replicas"] == f"${{{variable}:-{usual}}}"


def test_everybody_knows_the_cluster_key_and_the_brokers_password_and_the_proxy_alone_the_api_key() -> None:
    for name in (*WORKERS, "proxy"):
        environment = service(name)["environment"]
        assert environment["TRIPTYCH_CLUSTER_KEY"] is None  # passed on from the shell or .env
        assert environment["TRIPTYCH_BROKER"] == "redis://:${TRIPTYCH_BROKER_PASSWORD:-}@broker:6379"
        assert ("TRIPTYCH_API_KEY" in environment) == (name == "proxy")
    assert service("broker")["environment"] == {"VALKEY_PASSWORD": "${TRIPTYCH_BROKER_PASSWORD:-}"}
    (command,) = (line for line in stages()["broker"] if line.startswith("CMD"))
    assert "requirepass '$VALKEY_PASSWORD'" in command


def test_only_the_proxy_is_published_and_only_to_this_host() -> None:
    assert [name for name in SERVICES if "ports" in service(name)] == ["proxy"]
    assert service("proxy")["ports"] == ["${TRIPTYCH_PUBLISH:-127.0.0.1:8000}:8000"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_setting_in_the_environment_exists(name: str) -> None:
    for variable in service(name).get("environment", {}):
        if variable.startswith("TRIPTYCH_"):
            field, _, nested = variable.removeprefix("TRIPTYCH_").lower().partition("__")
            assert field in Settings.model_fields, variable
            assert not nested or nested in EngineConfig.model_fields, variable


def test_settings_that_proxy_and_workers_read_reach_both() -> None:
    for name in (*WORKERS, "proxy"):
        assert {"TRIPTYCH_ENGINE__MAX_MODEL_LEN", "TRIPTYCH_REQUEST_TIMEOUT_S"} <= service(name)["environment"].keys()


@pytest.mark.parametrize("name", WORKERS)
def test_memory_of_a_worker_can_be_bounded(name: str) -> None:
    """A worker does not know of others on its host: by default each takes half of what is free."""
    environment = service(name)["environment"]
    for variable in ("TRIPTYCH_ENGINE__MEMORY_FRACTION", "TRIPTYCH_ENGINE__MEMORY_BYTES"):
        assert environment.get(variable, "not passed on") is None


def test_gpu_overlay_changes_the_workers_only() -> None:
    services = compose(FILES[1])["services"]
    assert set(services) == set(WORKERS)
    for settings in services.values():
        (device,) = settings["deploy"]["resources"]["reservations"]["devices"]
        assert "gpu" in device["capabilities"]
        assert settings["build"]["args"] == {
            "TORCH": "cuda",
            "BASE_IMAGE": "${BASE_IMAGE:-python:3.11}",  # Triton needs a C compiler in the worker
            "CUDA_ARCHS": "${TRIPTYCH_CUDA_ARCHS:-8.0 9.0a}",
        }
        assert settings["image"] != service("encoder")["image"]


def test_services_are_built_from_targets_of_the_one_dockerfile() -> None:
    built = {name: service(name)["build"]["target"] for name in SERVICES}
    assert built == {"broker": "broker", "proxy": "proxy", **dict.fromkeys(WORKERS, "worker")}
    assert set(TARGETS) <= stages().keys()


@pytest.mark.parametrize("target", TARGETS)
def test_image_runs_as_a_normal_user(target: str) -> None:
    name, users = target, list[str]()
    while name in stages() and not users:
        users = [line.split()[1] for line in stages()[name] if line.startswith("USER ")]
        name = stages()[name][0].split()[1]
    assert int(users[-1].split(":")[0]) > 0


@pytest.mark.parametrize("target", ["proxy", "broker"])
def test_only_workers_hold_torch(target: str) -> None:
    assert "worker-packages" in ancestry("worker")
    names = ancestry(target)
    assert "worker-packages" not in names
    assert not any("worker" in line or "torch" in line for name in names for line in stages()[name])


def test_workers_find_the_kernels_that_their_image_was_built_with() -> None:
    (made,) = (line for line in stages()["kernels"] if line.startswith("RUN"))
    assert "XDG_CACHE_HOME=/kernels python3 -m tools.compose.kernels" in made
    assert "COPY --from=kernels /kernels /opt/kernels" in stages()["worker"]
    assert "ENV XDG_CACHE_HOME=/opt/kernels" in stages()["worker"]
    assert "kernels" not in ancestry("proxy") | ancestry("broker")


def test_gpu_workers_find_the_kernels_of_flashinfer_in_its_package() -> None:
    (made,) = (line for line in stages()["gpu-kernels"] if line.startswith("RUN"))
    assert "sh tools/compose/flashinfer.sh /opt/toolkit" in made
    assert "COPY --from=gpu-kernels /opt/venv /opt/venv" in stages()["worker"]
    assert "gpu-kernels" not in ancestry("proxy") | ancestry("broker")


def test_gpu_images_hold_one_of_the_permitted_flashinfers() -> None:
    (version,) = (line.partition("=")[2] for line in stages()["worker-packages"] if line.startswith("ARG FLASHINFER="))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (permitted,) = map(Requirement, extras["cuda"])
    assert permitted.specifier.contains(version)
    (installed,) = (line for line in stages()["worker-packages"] if line.startswith("RUN"))
    assert f'echo "{permitted.name}==$FLASHINFER" > constraints-cuda.txt' in installed


@pytest.mark.parametrize(
    ("programs", "sentence"),
    [
        ({}, "need a C++ compiler: set BASE_IMAGE"),
        ({"c++": "", "python": ""}, "torch has no CUDA: build the GPU image from a package index"),
        ({"c++": "", "python": "echo 12.8"}, "pip finds no nvcc for CUDA 12.8, torch's release"),
        ({"c++": "", "cc": "", "ln": "", "python": KERNEL_FAILS}, "see the kernel that FAILED above"),
        ({"c++": "", "cc": "", "ln": "", "python": "echo 13.0"}, ""),
    ],
)
def test_the_build_of_a_gpu_image_says_why_flashinfer_would_not_compute(
    programs: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    toolkit = tmp_path / "nvidia" / "cu13" / "bin"
    toolkit.mkdir(parents=True)
    for program, body in {**programs, str(toolkit / "nvcc"): ""}.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / program).chmod(0o755)
    command = ["/bin/sh", str(ROOT / "tools" / "compose" / "flashinfer.sh"), str(tmp_path)]
    run = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert run.returncode == int(bool(sentence))
    assert sentence in run.stderr
    assert run.stderr.count("\n") == run.returncode, "one sentence"


def test_dockerfile_copies_every_package_and_its_ignore_file_lets_them_in() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {pattern.rstrip("*") for pattern in include}
    copied = {source for line in stages()["triptych"] if line.startswith("COPY") for source in line.split()[1:-1]}
    assert packages <= copied
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    assert packages <= {line.removeprefix("!") for line in ignore if line.startswith("!")}


def test_documentation_names_exactly_the_variables_of_the_files() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs" / "deploy" / "compose.md").read_text(), re.M)
    assert {name for row in rows for name in re.findall(r"`([A-Z][A-Z0-9_]+)`", row)} == variables()


@pytest.mark.parametrize("name", WORKERS)
def test_swarm_ends_no_worker_that_was_ready_for_lack_of_a_broker_or_for_a_drain(name: str, tmp_path: Path) -> None:
    statuses = {"/ready": 503, "/health": 200}

    class Worker(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses[self.path])
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    program, _, command = compose(STACK)["services"][name]["healthcheck"]["test"][1:]
    with HTTPServer(("127.0.0.1", 0), Worker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = command.replace(":8000", f":{server.server_port}").replace("/tmp/", f"{tmp_path}/")

        def is_healthy() -> bool:
            return subprocess.run([program, "-c", command], capture_output=True, check=False).returncode == 0

        assert not is_healthy(), "it loads its model"
        statuses["/ready"] = 200
        assert is_healthy()
        statuses["/ready"] = 503
        assert is_healthy(), "it drains, or has no broker"
        statuses["/health"] = 503
        assert not is_healthy()
        server.shutdown()


def test_documented_drain_needs_no_cluster_key() -> None:
    """By default the workers have none, and then take orders from their own container alone."""
    page = (ROOT / "docs" / "deploy" / "compose.md").read_text()
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S))
    assert "triptych drain" not in commands
    assert f"docker exec ID python3 -m {drain.__name__}" in commands
    assert Settings.model_fields["port"].default == 8000, "the drain asks the port of the settings"
    assert all(service(name)["command"][-2:] == ["--port", "8000"] for name in WORKERS)


def test_transcript_in_the_documentation_is_of_the_present_test_and_images() -> None:
    files = sorted((ROOT / "tools" / "compose").glob("*.*"))
    files += [ROOT / name for name in ("Dockerfile", "docker-compose.yml", "docker-compose.stack.yml")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    page = (ROOT / "docs" / "deploy" / "compose.md").read_text()
    assert f"\ntest and images of {digest[:16]}\n" in page, "put the output of `make compose-test` into compose.md"
