"""Replicas and the command, made without Ray."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import Settings
from launch.ray import replicas
from launch.ray import serve as command


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
    settings = Settings(model="signpost", broker="redis://127.0.0.1:1", lora_modules=(f"poems={tmp_path}",))
    await replicas.LateProxy(settings, own_broker=False)({}, None, None)  # type: ignore[arg-type]
    assert made[0].info.adapters == {"poems": tmp_path}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_workers_load_leaves_no_application_behind(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(command, "application_of", lambda _: None)
    monkeypatch.setattr(command.ray, "init", lambda **_: None)
    monkeypatch.setattr(command.ray, "nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr(command.ray_serve, "start", lambda **_: None)
    monkeypatch.setattr(command.ray_serve, "run", lambda *_, **__: os.kill(os.getpid(), number))
    monkeypatch.setattr(command.ray_serve, "delete", deleted.append)
    monkeypatch.setattr(command.time, "sleep", lambda _: pytest.fail("it is served"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert command.serve(Settings(cluster="mine")) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert deleted == ["mine"]
