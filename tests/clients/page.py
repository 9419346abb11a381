"""docs/reference/clients.md, from the last results of the clients' suites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.clients.registry import CLIENTS, ROOT, Check, Client, checks

TABLE: Final = ROOT / "docs" / "reference" / "clients.md"
_HEAD: Final = """\
# Clients that were tried

`make clients-test` runs each client against clusters of bundled and tiny models, in an environment with these versions,
and holds this page to the results. [Connect clients](../how-to/clients.md) has a snippet for each.

| client | versions | checks that pass |
|---|---|---|
"""
_REST: Final = """
## Not passed, and why

`langchain` includes LangChain's standard tests of chat models (`langchain-tests`), with a model of random weights.
Biases of a few tokens end its calls and texts. What that model cannot do is expected to fail; what it does not take is
left out.

| client | check | outcome |
|---|---|---|
"""


def table() -> str:
    """Return the page as the results have it."""
    return _HEAD + "".join(map(_row, CLIENTS.values())) + _REST + "".join(_not_passed())


def _row(client: Client) -> str:
    names = list(dict.fromkeys(_name(check) for check in checks(client) if check.outcome == "works"))
    return f"| `{client.name}` | {client.versions()} | {len(names)}: {', '.join(names)} |\n"


def _not_passed() -> Iterator[str]:
    for client in CLIENTS.values():
        rows = [(_name(check), f"{check.outcome}: {check.why}") for check in checks(client) if check.outcome != "works"]
        yield from (f"| `{client.name}` | {name} | {outcome} |\n" for name, outcome in dict.fromkeys(rows))


def _name(check: Check) -> str:
    """Return what a check tries, without its parameters."""
    return check.name.partition("[")[0].replace("_", " ")
