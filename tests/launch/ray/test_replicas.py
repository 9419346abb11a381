"""Replicas of the Ray application, made without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.ray import replicas


async def test_a_proxy_has_the_adapters_without_which_it_would_use_no_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    made: list[Any] = []

    def make_app(service: Any, port: int) -> Any:
        async def application(*_: Any) -> None:
            made.append(service)

        return application

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="1"))
    monkeypatch.setattr(replicas.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(replicas, "_node_address", lambda: "127.0.0.1")
    monkeypatch.setattr("proxy.app.make_app", make_app)
    monkeypatch.setattr(replicas, "setup_logging", lambda *_: None)
    values = {"model": "signpost", "broker": "redis://127.0.0.1:1", "lora_modules": (f"poems={tmp_path}",)}
    await replicas.LateProxy(values, own_broker=False)({}, None, None)  # type: ignore[arg-type]
    assert made[0].info.adapters == {"poems": tmp_path}
