"""`triptych doctor`: findings by subject, remedies beside faults, and an exit code that scripts can use."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from common.config import EngineConfig, Settings
from common.model_info import BUNDLED
from common.process.gpu_memory import PROCESS_BYTES
from common.process.ports import free_port
from launch.terminal import doctor
from launch.terminal.doctor import Finding, check_gpu, check_machine, check_model, check_network, examine, run_doctor

Usage = namedtuple("Usage", "total used free")


def settings(**more: object) -> Settings:
    return Settings(**{"port": free_port("127.0.0.1"), **more})  # type: ignore[arg-type]


def found(findings: list[Finding], subject: str) -> Finding:
    return next(one for one in findings if one.subject == subject)


def test_a_machine_that_runs_these_tests_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(settings(), as_json=True) == 0
    findings = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert {"system", "Python", "cores", "memory", "shared memory", "packages", "port", "broker", "model"} <= {
        *findings
    }
    assert findings["broker"]["found"].endswith("starts")
    assert "signpost: Qwen2_5_VLForConditionalGeneration, 5.35 M parameters" in findings["model"]["found"]
    assert not any(one["state"] == "ok" and one["remedy"] for one in findings.values())


def test_every_fault_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_cores", lambda: 1)
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**30, 2**30, 0))
    findings = list(check_machine(settings()))
    bad = {one.subject for one in findings if one.state == "warn"}
    assert {"cores", "memory", "temporary files"} <= bad
    assert all(one.remedy for one in findings if one.state != "ok")


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> int:
        raise OSError("no such cgroup")

    monkeypatch.setattr(doctor, "available_cores", breaks)
    findings = examine(settings(model="./no-such-folder"))
    assert found(findings, "machine").found == "cannot be checked: OSError('no such cgroup')"
    assert "the folder does not exist" in found(findings, "model").found


def test_a_fault_is_printed_with_its_remedy_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(settings(model="./no-such-folder"), as_json=False) == 1
    output = capsys.readouterr().out
    assert "cannot find the model './no-such-folder'" in output
    assert "→ docs/reference/errors.md" in output
    assert "a cluster cannot run here" in output


def test_a_taken_port_is_a_warning_and_a_silent_broker_a_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as closed:
            free = closed.getsockname()[1]
        findings = list(check_network(Settings(port=port, broker=f"redis://:secret@127.0.0.1:{free}")))
    assert (found(findings, "port").state, found(findings, "broker").state) == ("warn", "fail")
    assert "address already in use" in found(findings, "port").found
    assert "secret" not in found(findings, "broker").found


def test_a_host_by_its_name_is_tried_and_an_unknown_one_named() -> None:
    free = found(list(check_network(Settings(host="localhost", port=0))), "port")
    unknown = found(list(check_network(Settings(host="no-such-host.invalid"))), "port")
    assert (free.state, unknown.state) == ("ok", "warn")
    assert "cannot listen on host 'no-such-host.invalid'" in unknown.found
    foreign = found(list(check_network(Settings(host="192.0.2.1"))), "port")
    assert "cannot listen on 192.0.2.1:8000: cannot assign requested address" in foreign.found
    assert (unknown.remedy, foreign.remedy) == ("correct --host", "correct --host")


def test_a_model_of_the_hub_is_not_downloaded() -> None:
    (finding,) = check_model(settings(model="nobody/no-such-model"))
    assert finding.state == "warn"
    assert finding.found == "nobody/no-such-model is not on this machine"


def test_a_model_that_does_not_fit_is_told_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.cluster.shares.available_memory", lambda: 2**20)
    (finding,) = check_model(settings())
    assert finding.state == "fail"
    assert "the weights of signpost take" in finding.found


@pytest.mark.parametrize(("transport", "state"), [("shm", "ok"), ("nixl", "fail")])
def test_what_nixl_takes_of_a_gpu_counts(monkeypatch: pytest.MonkeyPatch, transport: str, state: str) -> None:
    total = (2 * PROCESS_BYTES + 2**28) * 10 // 9
    monkeypatch.setattr("launch.cluster.shares.total_gpu_memory", lambda: total)
    monkeypatch.setattr("broker.transports.nixl.agent.module_name", lambda: "nixl_cu13")
    engine = EngineConfig(device="cuda")
    (finding,) = check_model(settings(engine=engine, topology="1e1pd", transport=transport, host="localhost"))
    assert finding.state == state, finding.found


def test_cut_weights_are_found(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLED / "signpost", tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(b"no weights")
    (finding,) = check_model(settings(model=str(folder)))
    assert finding.state == "fail"
    assert "is not a safetensors file" in finding.found


def test_a_gpu_that_torch_does_not_find_is_a_fault_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    states = {
        device: [one.state for one in check_gpu(settings(engine=EngineConfig(device=device)))]
        for device in ("cpu", "cuda")
    }
    assert states == {"cpu": ["ok"], "cuda": ["fail"]}


def test_an_old_gpu_and_missing_flashinfer_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (2**30, 2**34))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "V100")
    monkeypatch.setattr(doctor, "_version", lambda name: None if name.startswith("flash") else "1")
    gpu, flashinfer = check_gpu(settings())
    assert (gpu.state, flashinfer.state) == ("warn", "warn")
    assert "V100, 1.0 GiB free of 16.0 GiB, capability 7.0" in gpu.found
    assert "flashinfer-python" in flashinfer.remedy
