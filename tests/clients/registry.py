"""The clients: their names, packages, environments and suites, and how their code is run against a cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest

ROOT: Final = Path(__file__).parents[2]
ENVIRONMENTS: Final = ROOT / "build" / "clients"
NODE: Final = str(ENVIRONMENTS / "node" / "bin" / "node")
RESULTS: Final = ENVIRONMENTS / "results"
PAGE: Final = ROOT / "docs" / "how-to" / "clients.md"
PACKAGES: Final = Path(__file__).parent / "packages"
SUITES: Final = Path(__file__).parent / "suites"
TIMEOUT_S: Final = 400.0
_FENCE: Final = re.compile(r"^```(\w+) ([\w-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Client:
    """`packages` are those whose versions count, `environment` is a folder below ENVIRONMENTS."""

    name: str
    packages: tuple[str, ...]
    environment: str

    @property
    def suite(self) -> Path:
        stem = "suite_" + self.name.replace("-", "_")
        return SUITES / f"{stem}{'.mjs' if self.environment == 'node' else '.py'}"

    def require(self) -> None:
        """Skip the test where the packages could not be installed."""
        if not (ENVIRONMENTS / f"{self.environment}.stamp").exists():
            pytest.skip(f"the packages of {self.name} are not installed: `make clients-test` says why")

    def versions(self) -> str:
        """Return the pinned versions."""
        if self.environment == "node":
            lock = json.loads((PACKAGES / "package-lock.json").read_text())["packages"]
            return ", ".join(f"{name} {lock[f'node_modules/{name}']['version']}" for name in self.packages)
        lock = dict(re.findall(r"^([\w.-]+)==(\S+)", (PACKAGES / f"{self.environment}.txt").read_text(), re.MULTILINE))
        return ", ".join(f"{name} {lock[name]}" for name in self.packages)


CLIENTS: Final = {
    client.name: client
    for client in (
        Client("openai-python", ("openai",), "agents"),
        Client("openai-npm", ("openai",), "node"),
        Client("ai-sdk", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"), "node"),
        Client("langchain", ("langchain-openai", "langchain-tests"), "agents"),
        Client("openai-agents", ("openai-agents",), "agents"),
        Client("pydantic-ai", ("pydantic-ai-slim",), "agents"),
        Client("instructor", ("instructor",), "agents"),
        Client("litellm", ("litellm",), "routers"),
        Client("llama-index", ("llama-index-llms-openai-like",), "routers"),
    )
}


@dataclass(frozen=True)
class Snippet:
    """A piece of the page. `prints` are the lines that its comments promise."""

    client: str
    language: str
    code: str

    @property
    def prints(self) -> list[str]:
        return re.findall(r"(?:#|//) prints: (.+)$", self.code, re.MULTILINE)


def snippets() -> list[Snippet]:
    return [Snippet(client, language, code) for language, client, code in _FENCE.findall(PAGE.read_text())]


@dataclass(frozen=True)
class Check:
    """A test of a suite, and its end: "works", or why it was expected to fail or left out."""

    name: str
    outcome: str
    why: str = ""


def python_of(client: str) -> str:
    """Return the Python of a client's environment."""
    return str(ENVIRONMENTS / CLIENTS[client].environment / "bin" / "python")


def run(command: list[str], servers: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run code of a client in the checkout, without its telemetry; `servers` are variables with addresses."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "LANGSMITH_"))}
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "DO_NOT_TRACK": "1"}
    variables |= {**quiet, "CHECKOUT": str(ROOT), **servers}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)


def run_suite(client: Client, servers: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run all checks of a client; the results go to RESULTS as JUnit's XML."""
    RESULTS.mkdir(exist_ok=True)
    report = RESULTS / f"{client.name}.xml"
    report.unlink(missing_ok=True)
    if client.environment == "node":
        suite = shutil.copy(client.suite, ENVIRONMENTS / "node")  # modules are looked for beside the file
        done = run([NODE, "--test", "--test-reporter=junit", suite], servers)
        report.write_text(done.stdout)
        return done
    options = ["--noconftest", "-p", "no:cacheprovider", "-c", str(SUITES / "pytest.ini"), "--rootdir", str(SUITES)]
    command = [python_of(client.name), "-m", "pytest", *options, f"--junitxml={report}", str(client.suite)]
    return run(command, servers)


def checks(client: Client) -> Iterator[Check]:
    """Yield the results of a suite's last run, in its order."""
    for case in ElementTree.parse(RESULTS / f"{client.name}.xml").iter("testcase"):
        ended = next(iter(case), None)
        name = case.attrib["name"].removeprefix("test_")
        if ended is None or ended.tag in ("system-out", "properties"):
            yield Check(name, "works")
        else:
            why = ended.attrib.get("message", "")
            expected = ended.attrib.get("type") == "pytest.xfail"
            yield Check(name, "expected" if expected else ended.tag, why)


def run_snippet(snippet: Snippet, address: str, python: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a snippet as the page has it, with another address of the server; one in Python by `python`."""
    code = snippet.code.replace("http://127.0.0.1:8000", address)
    if snippet.language == "sh":
        return run(["/bin/sh", "-c", code], {})
    if snippet.language == "js":
        file = ENVIRONMENTS / "node" / f"snippet_{snippet.client}.mjs"
        file.write_text(code)
        return run([NODE, str(file)], {})
    file = folder / "snippet.py"
    file.write_text(code)
    return run([python, str(file)], {})
