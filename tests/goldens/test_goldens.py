"""Names and bytes that others rely on are as recorded: what is new may come, what was there stays as it was."""

from __future__ import annotations

import pytest

from tests.goldens.recorded import GOLDENS, read

BYTES = ("messages", "transports")


@pytest.mark.parametrize("name", BYTES)
def test_messages_are_byte_for_byte_what_other_processes_expect(name: str) -> None:
    assert GOLDENS[name]() == read(name)


def test_the_description_of_the_api_is_as_recorded() -> None:
    assert GOLDENS["openapi"]() == read("openapi")


@pytest.mark.parametrize("name", ["metrics", "log_events"])
def test_names_that_dashboards_and_searches_use_stay(name: str) -> None:
    missing = set(read(name)) - set(GOLDENS[name]())
    assert not missing, f"gone: {sorted(missing)}"


def test_settings_keep_their_names_and_defaults() -> None:
    before, now = read("settings"), GOLDENS["settings"]()
    assert {name: now.get(name, "(gone)") for name in before} == before


def test_commands_keep_their_options() -> None:
    now = GOLDENS["options"]()
    for command, options in read("options").items():
        missing = set(options) - set(now.get(command, ()))
        assert not missing, f"triptych {command} has lost {sorted(missing)}"
