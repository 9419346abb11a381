"""Clients that others wrote, in environments of their own, against clusters. `make clients-test` installs them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import httpx
import pytest

from tests.clients.page import TABLE, table
from tests.clients.registry import CLIENTS, ROOT, Client, Snippet, checks, python_of, run_snippet, run_suite, snippets

EXAMPLE = re.compile(r"```json POST /v1/chat/completions\n(.*?)```", re.DOTALL)
OURS = ("openai-python", "curl")
"""Clients that the tests' own environment has."""


def check_snippet(snippet: Snippet, servers: dict[str, str], folder: Path, python: str = sys.executable) -> None:
    address = servers["SPEECH_URL" if "audio" in snippet.code else "SIGNS_URL"]
    done = run_snippet(snippet, address, python, folder)
    assert done.returncode == 0, done.stderr
    assert snippet.prints
    for line in snippet.prints:
        assert line in done.stdout, done.stdout + done.stderr


@pytest.mark.clients
@pytest.mark.timeout(450)
@pytest.mark.parametrize("client", CLIENTS.values(), ids=list(CLIENTS))
def test_the_suite_of_a_client_passes(client: Client, servers: dict[str, str]) -> None:
    client.require()
    done = run_suite(client, servers)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert any(check.outcome == "works" for check in checks(client))


@pytest.mark.clients
@pytest.mark.parametrize("client", CLIENTS)
def test_the_snippets_of_a_client_do_as_the_page_says(client: str, examples: dict[str, str], tmp_path: Path) -> None:
    CLIENTS[client].require()
    for snippet in [one for one in snippets() if one.client == client]:
        check_snippet(snippet, examples, tmp_path, python_of(client))


@pytest.mark.clients
def test_the_table_of_the_page_is_that_of_the_results() -> None:
    """`make clients-test RECORD=1` writes the table of this run."""
    for client in CLIENTS.values():
        client.require()
    if os.environ.get("CLIENTS_RECORD"):
        TABLE.write_text(table())
    assert TABLE.read_text() == table()


@pytest.mark.cluster
@pytest.mark.weights
@pytest.mark.parametrize("client", OURS)
def test_snippets_without_foreign_packages_do_as_the_page_says(
    client: str, examples: dict[str, str], tmp_path: Path
) -> None:
    found = [one for one in snippets() if one.client == client]
    assert found
    for snippet in found:
        check_snippet(snippet, examples, tmp_path)


def test_every_client_has_a_snippet_and_a_row() -> None:
    assert {snippet.client for snippet in snippets()} == {*CLIENTS, "curl"}
    assert set(TABLE.read_text().split("`")) >= set(CLIENTS)


@pytest.mark.cluster
@pytest.mark.weights
def test_the_structured_example_of_the_api_page_is_answered_without_blanks(examples: dict[str, str]) -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    example = next(text for text in EXAMPLE.findall(page) if '"colour"' in text)
    answer = httpx.post(f"{examples['SIGNS_URL']}/v1/chat/completions", json=json.loads(example) | {"temperature": 0})
    choice = answer.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"colour":"red"}', "stop")
