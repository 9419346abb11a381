"""Collect what the goldens hold. `python -m tests.goldens.recorded` writes them again after a deliberate change."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
PRODUCT = ("common", "broker", "engine", "services", "proxy", "launch")


def messages() -> dict[str, str]:
    """The encoded bytes of one message of every kind, as hexadecimal digits."""
    with mock.patch.object(time, "monotonic", return_value=1_700_000_000.0):
        from common.messages import encode
        from tests.security.real_messages import HEADER, MESSAGES

        return {
            f"{type(message).__name__} {number}": encode(message).hex()
            for batch in (*MESSAGES.values(), [HEADER])
            for number, message in enumerate(batch)
        }


def transports() -> dict[str, list[str]]:
    """The same for what the two ends of each transport say to each other."""
    from common.messages import encode
    from tests.broker.transports.test_fuzz import WIRES

    return {name: [encode(message).hex() for message in batch] for name, (_, batch) in WIRES.items()}


def openapi() -> dict[str, Any]:
    """The description of the HTTP API, without its prose."""
    from proxy.api.openapi import document

    found: dict[str, Any] = _without_prose(json.loads(json.dumps(document())))
    return found


def metrics() -> list[str]:
    """The names of all metrics that stand in the product's code."""
    from proxy.server.metrics import ProxyMetrics
    from services.process.metric_help import HELP
    from services.process.metrics import WorkerMetrics

    fixed = {family.name for kind in (ProxyMetrics, WorkerMetrics) for family in kind().registry.collect()}
    return sorted(fixed | {f"triptych_{name}" for name in HELP})


def settings() -> dict[str, Any]:
    """Every setting with its default."""
    from common.config import EngineConfig, Settings

    found = {
        prefix + name: field.get_default(call_default_factory=True)
        for prefix, model in (("", Settings), ("engine.", EngineConfig))
        for name, field in model.model_fields.items()
        if name != "engine"
    }
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def options() -> dict[str, list[str]]:
    """The options of every command."""
    from typer.main import get_command

    from launch.cli.app import app

    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return {
        name: sorted(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
        for name, command in sorted(commands.items())
    }


def log_events() -> list[str]:
    """The events of all log calls."""
    return sorted({event for tree in _trees(*PRODUCT) for event in _events(tree)})


GOLDENS = {f.__name__: f for f in (messages, transports, openapi, metrics, settings, options, log_events)}


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def differences(before: Any, now: Any, place: str = "") -> list[str]:
    """Every place where two records differ, with both values; encoded messages are compared field by field."""
    before, now = _plain(before), _plain(now)
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(key, before.get(key, "(absent)"), now.get(key, "(absent)")) for key in {**before, **now}]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(number, *pair) for number, pair in enumerate(zip(before, now, strict=True))]
    else:
        return [] if before == now else [f"{place}: recorded {before!r:.100}, now {now!r:.100}"]
    return [line for key, *pair in pairs for line in differences(*pair, f"{place}/{key}")]


def _plain(value: Any) -> Any:
    """What an encoded message holds; other values stay as they are."""
    if isinstance(value, str) and len(value) > 2 and re.fullmatch(r"([0-9a-f]{2})+", value):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.msgpack.decode(bytes.fromhex(value))
    return value


def _trees(*folders: str) -> Iterator[ast.Module]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ast.parse(path.read_text())


def _without_prose(node: Any) -> Any:
    if isinstance(node, dict):
        prose = [key for key in ("description", "summary") if isinstance(node.get(key), str)]
        return {key: _without_prose(value) for key, value in node.items() if key not in prose}
    return [_without_prose(value) for value in node] if isinstance(node, list) else node


def _events(tree: ast.Module) -> Iterator[str]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    for call in calls:
        if re.fullmatch(r"(self\._)?log\.(debug|info|warning|error|exception|critical)", ast.unparse(call.func)):
            yield from (arg.value for arg in call.args[:1] if isinstance(arg, ast.Constant))


if __name__ == "__main__":
    for name, collect in GOLDENS.items():
        text = json.dumps(collect(), indent=1, ensure_ascii=False, sort_keys=True)
        (FOLDER / f"{name}.json").write_text(text + "\n")
