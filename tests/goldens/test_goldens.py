"""Names and bytes that others rely on are as recorded: what is new may come, what was there stays as it was."""

from __future__ import annotations

import msgspec
import pytest

from tests.goldens.recorded import GOLDENS, differences, read

BYTES = ("messages", "transports")
ON_PURPOSE = "If meant: .venv/bin/python -m tests.goldens.recorded, read its git diff, name the change in CHANGELOG.md"
NEW_WIRE = f"{ON_PURPOSE}, and raise common.messages.PROTOCOL_VERSION: processes of two versions must not meet."


def compare(before: object, now: object, what_to_do: str) -> None:
    """Fail with all differences and what to do about them."""
    if before != now:
        places = differences(before, now) or ["the bytes differ, not the fields: their order or their types"]
        pytest.fail("\n".join([*places, "", what_to_do]), pytrace=False)


@pytest.mark.parametrize("name", BYTES)
def test_messages_are_byte_for_byte_what_other_processes_expect(name: str) -> None:
    compare(read(name), GOLDENS[name](), NEW_WIRE)


def test_the_description_of_the_api_is_as_recorded() -> None:
    compare(read("openapi"), GOLDENS["openapi"](), ON_PURPOSE)


@pytest.mark.parametrize("name", ["metrics", "log_events"])
def test_names_that_dashboards_and_searches_use_stay(name: str) -> None:
    missing = set(read(name)) - set(GOLDENS[name]())
    assert not missing, f"gone: {sorted(missing)}. {ON_PURPOSE}"


def test_settings_keep_their_names_and_defaults() -> None:
    before, now = read("settings"), GOLDENS["settings"]()
    compare(before, {name: now.get(name, "(gone)") for name in before}, ON_PURPOSE)


def test_commands_keep_their_options() -> None:
    now = GOLDENS["options"]()
    for command, options in read("options").items():
        missing = set(options) - set(now.get(command, ()))
        assert not missing, f"triptych {command} has lost {sorted(missing)}. {ON_PURPOSE}"


def test_a_difference_is_named_by_its_place_and_field() -> None:
    before = read("messages")
    fields = msgspec.msgpack.decode(bytes.fromhex(before["Generate 0"]))
    fields["sampling"]["top_k"] = 12345
    now = {**before, "Generate 0": msgspec.msgpack.encode(fields).hex()}
    [line] = differences(before, now)
    assert line.startswith("/Generate 0/sampling/top_k: recorded ")
    assert line.endswith(", now 12345")
    assert differences({"a": [1], "b": 2}, {"a": [1, 2]}) == [
        "/a: recorded [1], now [1, 2]",
        "/b: recorded 2, now '(absent)'",
    ]
