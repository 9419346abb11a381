"""The GPU check as a machine: stages with deadlines, what decides, and what it says. The stages here are small ones."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.waiting import alive, eventually
from tests.tools.gpu_check.test_gpu_carry import make_wheel
from tools.bench_gpu.__main__ import NAMES
from tools.gpu_check import check, environment, plan
from tools.gpu_check.carry import collect_kernels
from tools.gpu_check.environment import in_words, missing, missing_for_references
from tools.gpu_check.figures import Figure, duration, rate
from tools.gpu_check.hosted import Host
from tools.gpu_check.layout import Carried
from tools.gpu_check.stages import REPORT, Stage, read_json, read_junit, run_stage

WRITES = """
import json, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(json.dumps({'found': 'two things', 'figures': FIGURES}))
"""
FOREVER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


def script(name: str, source: str, limit_s: float = 60.0, *, decides: bool = True, **more: Any) -> Stage:
    return Stage(name, (sys.executable, "-c", source, REPORT), 1.0, limit_s, read_json, decides, **more)


def pytest_stage(folder: Path, body: str) -> Stage:
    path = folder / "test_it.py"
    path.write_text(body)
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={REPORT}", str(path))
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # which starts sooner
    return Stage("tests", command, 5, 60, read_junit, variables=variables)


def test_a_failed_stage_does_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = vars(duration("decode", "batch 1", [0.002, 0.004, 0.003], 0.0015))
    good = WRITES.replace("FIGURES", repr([figure]))
    monkeypatch.setattr(check, "STAGES", (script("broken", "raise SystemExit('no room')"), script("good", good)))
    arguments = ["--out", str(tmp_path / "out"), "--carried", str(tmp_path / "carried")]
    assert check.main(arguments) == 1
    report = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert [stage["verdict"] for stage in report["stages"]] == ["FAILED", "ok"]
    assert report["stages"][1]["figures"] == [figure]
    printed = capsys.readouterr().out
    assert "no report; the log ends: no room" in printed
    assert "| decode | batch 1 | 3 ms | 2–4 | 1.5 ms | 50% | – |" in printed
    results = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert results == ["gpu-check.json", "gpu-check.md", "logs.tar.gz"]
    assert (tmp_path / "out" / "gpu-check.md").read_text().strip() in printed
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as archive:
        assert {"logs/broken.log", "logs/good.log", "logs/good.report"} <= set(archive.getnames())
    assert check.main([*arguments, "--only", "good"]) == 0


def test_a_benchmark_that_fails_does_not_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "STAGES", (script("slow", "raise SystemExit(1)", decides=False),))
    assert check.main(["--out", str(tmp_path), "--carried", str(tmp_path)]) == 0


def test_what_was_short_of_time_is_told_with_the_command_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "import time; time.sleep(600)"
    stages = (script("slow", slow, decides=False), script("late", slow, decides=False))
    monkeypatch.setattr(check, "STAGES", (script("hung", slow, 0.5), *stages))
    out = tmp_path / "out"
    assert check.main(["--out", str(out), "--carried", str(tmp_path), "--budget-s", "2"]) == 1
    assert f"in a call of its own: --only slow,late --out {out}/rest\n" in capsys.readouterr().out


def test_a_benchmark_begins_where_half_of_its_time_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = WRITES.replace("FIGURES", "[]")
    long = replace(script("long", quick, decides=False), expected_s=70.0)
    monkeypatch.setattr(check, "STAGES", (long, replace(long, name="short", expected_s=50.0)))
    assert check.main(["--out", str(tmp_path), "--carried", str(tmp_path), "--budget-s", "34"]) == 0
    printed = capsys.readouterr().out
    assert "  long: no time left" in printed
    assert "  short: ok" in printed


def test_carried_checkpoints_are_used_where_they_are_and_fail_what_wants_them_where_they_are_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "import json, os, sys; json.dump({'found': os.environ['TRIPTYCH_GPU_MODELS']}, open(sys.argv[1], 'w'))"
    other = script("other", WRITES.replace("FIGURES", "[]"))
    monkeypatch.setattr(check, "STAGES", (script("checkpoints", says), other))
    monkeypatch.setattr(check, "MODELS_FOLDER", tmp_path / "models")
    folders = ["--out", str(tmp_path / "out"), "--carried", str(tmp_path)]
    assert check.main(folders) == 1
    (tmp_path / "models" / "1").mkdir(parents=True)
    assert check.main(folders) == 0
    (tmp_path / "models" / "1" / "parts.json").write_text('{"whisper": [["2/whisper.tar.xz.0", "f00d"]]}')
    capsys.readouterr()
    assert check.main(folders) == 1
    printed = capsys.readouterr().out
    assert "  checkpoints: FAILED" in printed
    assert "parts of whisper are not here" in printed
    assert "  other: ok" in printed
    assert check.main([*folders, "--only", "other"]) == 0


def test_a_stage_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    children = tmp_path / "child"
    source = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {FOREVER!r}, {str(children)!r}])"
    outcome = run_stage(script("stuck", source, limit_s=60.0), os.environ, tmp_path, left_s=15.0)
    assert (outcome.verdict, outcome.fails_the_check) == ("timed out", True)
    pid = int(children.read_text())
    eventually(lambda: not alive(pid), 10.0, f"the end of process {pid}")


def test_a_stage_without_time_does_not_begin_and_fails_the_check(tmp_path: Path) -> None:
    began_s = time.monotonic()
    outcome = run_stage(script("late", FOREVER), os.environ, tmp_path, left_s=-1.0)
    assert (outcome.verdict, outcome.fails_the_check) == ("no time left", True)
    assert not outcome.figures
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize(
    ("body", "verdict", "words"),
    [
        ("def test_a(): pass\ndef test_b(): pass", "ok", "2 passed"),
        ("def test_a(): pass\ndef test_b(): assert False", "FAILED", "1 passed, 1 failed: test_b"),
        (
            "import pytest\n@pytest.mark.skip(reason='needs a CUDA device')\ndef test_a(): pass",
            "FAILED",
            "0 passed, 1 skipped: needs a CUDA device",
        ),
    ],
)
def test_tests_that_all_skip_have_checked_nothing(tmp_path: Path, body: str, verdict: str, words: str) -> None:
    outcome = run_stage(pytest_stage(tmp_path, body), os.environ, tmp_path, left_s=60)
    assert (outcome.verdict, outcome.found) == (verdict, words)


def test_tests_that_were_through_when_the_time_was_up_are_told(tmp_path: Path) -> None:
    tests = pytest_stage(tmp_path, "import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)")
    outcome = run_stage(replace(tests, limit_s=30), os.environ, tmp_path, left_s=60)
    assert (outcome.verdict, outcome.found, outcome.fails_the_check) == ("timed out", "after 30 s; 1 passed", True)


def test_what_this_machine_cannot_run_is_said_and_does_not_decide(tmp_path: Path) -> None:
    stage = script("sanitizer", WRITES, missing=lambda _: "compute-sanitizer is not on the PATH")
    outcome = run_stage(stage, os.environ, tmp_path, left_s=60)
    assert (outcome.verdict, outcome.found) == ("not here", "compute-sanitizer is not on the PATH")
    assert not outcome.fails_the_check


def test_a_tool_that_refuses_the_device_is_not_here_in_its_own_words(tmp_path: Path) -> None:
    source = "raise SystemExit('========= Error: Device not supported. Please refer to the manual')"
    outcome = run_stage(script("sanitizer", source, refusals=("Device not supported",)), os.environ, tmp_path, 60)
    assert (outcome.verdict, outcome.fails_the_check) == ("not here", False)
    assert outcome.found == "Error: Device not supported. Please refer to the manual"
    assert run_stage(script("sanitizer", source), os.environ, tmp_path, 60).verdict == "FAILED"


def test_figures_of_a_benchmark_that_is_ended_are_kept(tmp_path: Path) -> None:
    figure = vars(duration("decode", "batch 1", [0.002]))
    source = WRITES.replace("FIGURES", repr([figure])) + "import time; time.sleep(600)"
    outcome = run_stage(script("slow", source, limit_s=10.0, decides=False), os.environ, tmp_path, 60)
    assert (outcome.verdict, outcome.figures) == ("timed out", [figure])


HOST = """
import json, os, sys, time
print("listening", file=sys.stderr)
for line in sys.stdin:
    told = json.loads(line)
    word, *_ = told["words"]
    open(told["log"], "a").write(f"{word} {os.getpid()}")
    if word == "sleep":
        time.sleep(600)
    if word == "die":
        raise SystemExit(3)
    print("1 goodbye" if word == "spoil" else len(word) % 2, flush=True)
"""


def test_stages_share_a_process_as_long_as_it_is_well(tmp_path: Path) -> None:
    log, pids = tmp_path / "log", []
    with Host((sys.executable, "-c", HOST), os.environ) as host:
        for word, status in (("ab", 0), ("c", 1), ("die", 3), ("ef", 0), ("spoil", 1), ("gh", 0)):
            assert host.run((word,), log, 60) == status
            pids.append(int(log.read_text().split()[-1]))
        assert host.run(("sleep",), log, 0.5) is None
        assert host.run(("ij",), log, 60) == 0
        pids.append(int(log.read_text().split()[-1]))
    assert [pids.index(pid) for pid in pids] == [0, 0, 0, 3, 3, 5, 6]
    assert log.read_text().startswith("listening\n")
    for pid in pids:
        eventually(lambda pid=pid: not alive(pid), 10.0, f"the end of process {pid}")


def test_benchmarks_share_a_process(tmp_path: Path) -> None:
    words = ("--toy", "--device", "cpu", "--repetitions", "1", "--out", REPORT)
    stages = [
        replace(stage, command=(*(stage.command[:1] if known else ("nonsense",)), *words))
        for stage, known in zip(plan.STAGES[-9:-7], (True, False), strict=True)
    ]
    assert [stage.name for stage in stages] == ["bench-decode", "bench-prefill"]
    results = check.Results(tmp_path / "out", tmp_path / "logs")
    outcomes = check.run_all(stages, os.environ, results, time.monotonic() + 600)
    assert [outcome.verdict for outcome in outcomes] == ["ok", "FAILED"]
    assert [figure["benchmark"] for figure in outcomes[0].figures] == ["limits", "limits", "decode", "decode"]
    assert "no benchmark nonsense" in outcomes[1].found


def test_a_stage_has_variables_of_its_own(tmp_path: Path) -> None:
    [sanitizer] = [stage for stage in plan.STAGES if stage.name == "sanitizer"]
    assert sanitizer.variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    source = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps({'found': os.environ['OWN']}))"
    stage = script("own", source, variables={"OWN": "its value"})
    assert run_stage(stage, {**os.environ, "OWN": "another"}, tmp_path, 60).found == "its value"


def test_what_comes_of_a_check_is_there_before_it_ends(tmp_path: Path) -> None:
    results = check.Results(tmp_path, tmp_path / "logs")
    late = f"import sys; open(sys.argv[1], 'w').write(open({str(results.json)!r}).read().replace('stages', 'found'))"
    stages = [script("good", WRITES.replace("FIGURES", "[]")), script("late", late, decides=False)]
    outcomes = check.run_all(stages, os.environ, results, time.monotonic() + 60)
    assert [outcome.stage for outcome in outcomes] == ["good", "late"]
    assert "'good'" in outcomes[1].found


def test_one_call_is_expected_to_have_time_for_all_stages() -> None:
    assert plan.INSTALL_S + plan.expected_s(plan.STAGES) <= 0.9 * plan.BUDGET_S
    assert plan.BUDGET_S <= 0.9 * 600
    assert all(stage.expected_s < stage.limit_s for stage in plan.STAGES)
    assert {stage.name for stage in plan.STAGES if not stage.decides} == {f"bench-{name}" for name in NAMES}


def test_what_is_expected_is_counted_as_it_runs() -> None:
    alone = script("alone", "", decides=False)
    assert plan.expected_s([script("one", ""), script("two", ""), alone]) == 2.0
    assert plan.expected_s([script("one", ""), script("two", ""), alone], lanes=1) == 3.0
    hosted = [replace(alone, name=name, host=("python",)) for name in ("first", "second")]
    assert plan.expected_s(hosted) == 2.0 + plan.START_S


def test_each_gpu_test_belongs_to_one_stage() -> None:
    for file in sorted((check.ROOT / "tests" / "gpu").glob("test_*.py")):
        path = str(file.relative_to(check.ROOT))
        stages = [stage for stage in plan.STAGES if path in stage.command and stage.name != "sanitizer"]
        for name in re.findall(r"def (test_\w+)", file.read_text()):
            assert len([stage for stage in stages if selects(stage, name)]) == 1, name


def selects(stage: Stage, name: str) -> bool:
    """Whether a stage's `-k` takes a test of this name."""
    words = list(stage.command)
    expression = words[words.index("-k") + 1] if "-k" in words else "test"
    return bool(eval(re.sub(r"\b(?!(?:not|and|or)\b)\w+", lambda word: str(word[0] in name), expression)))


def test_unknown_stages_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no stage nonsense; there are: environment, .*bench-decode"):
        check.main(["--only", "nonsense", "--out", str(tmp_path), "--carried", str(tmp_path)])


def test_the_paths_of_the_plan_exist() -> None:
    words = [word for stage in plan.STAGES for word in stage.command if word.startswith("tests/")]
    assert words
    assert [word for word in words if not (check.ROOT / word).exists()] == []


def test_carried_packages_come_first_and_kernels_outlive_the_run(tmp_path: Path) -> None:
    carried = Carried(tmp_path)
    carried.site.mkdir()
    variables = check.environment(carried, tmp_path / "models")
    assert variables["PYTHONPATH"].split(os.pathsep)[:2] == [str(carried.site), str(check.ROOT)]
    assert variables["FLASHINFER_WORKSPACE_BASE"] == str(carried.workspace)
    assert variables["TRIPTYCH_GPU_MODELS"] == str(tmp_path / "models")


def test_carried_wheels_and_kernels_are_installed_into_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    carried = Carried(tmp_path)
    carried.wheels.mkdir()
    make_wheel(carried.wheels, "flashinfer_python", "0.6.13", "torch")
    built = tmp_path / "workspace" / "cached_ops" / "page"
    built.mkdir(parents=True)
    (built / "page.so").write_bytes(b"kernel")
    collect_kernels(tmp_path / "workspace", carried.kernels)
    for _ in range(2):  # again, over what the last check has installed
        check.install(carried)
        assert (carried.site / "flashinfer_python-0.6.13.dist-info" / "METADATA").is_file()
        assert (carried.site / "flashinfer" / "data" / "aot" / "page" / "page.so").read_bytes() == b"kernel"


def test_missing_requirements_are_named_with_who_asks() -> None:
    assert missing(["redis>=5", "no-such-package>=2", "redis>=99", "torch; python_version < '3'"]) == [
        "no-such-package>=2 (for triptych, there is none)",
        f"redis>=99 (for triptych, there is {__import__('redis').__version__})",
    ]
    assert missing(["no-such-package"], frozenset({"no-such-package"})) == []


class NeedsTorchvision(type):
    """How transformers 5.17 stands in for a class without torchvision."""

    def __getattr__(cls, name: str) -> Any:
        raise ImportError("\nAutoImageProcessor requires the Torchvision library but it was not found")


def test_torchvision_is_missing_where_transformers_makes_no_processor_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"transformers": "5.17.0", "torchvision": None}
    monkeypatch.setattr(environment, "_version", versions.get)
    monkeypatch.setattr("transformers.AutoImageProcessor", type("Anything", (), {"from_pretrained": print}))
    assert missing_for_references() == []
    monkeypatch.setattr("transformers.AutoImageProcessor", NeedsTorchvision("AutoImageProcessor", (), {}))
    [told] = missing_for_references()
    assert told.startswith("torchvision (for transformers' processors of pictures")
    monkeypatch.setitem(versions, "torchvision", "0.26.0")
    assert missing_for_references() == []


def test_a_bare_machine_is_told_so_instead_of_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert "packaging" in missing(["redis>=5"])[0]


def test_a_machine_without_a_gpu_is_told_what_to_do() -> None:
    facts = {"python": "3.12", "versions": {}, "gpu": None, "missing": []}
    assert "torch finds no CUDA device" in in_words(facts)
    assert "make gpu-carry" in in_words({**facts, "missing": ["redis>=5 (for triptych, there is none)"]})


def test_the_share_of_a_limit_is_one_at_the_limit() -> None:
    assert duration("a", "b", [0.004], 0.004).share == 1.0
    assert rate("a", "b", "GB/s", [2.0], 6.0, limit=4.0).share == 0.75
    assert rate("a", "b", "GB/s", [2.0, 1.0, 4.0], 4.0) == Figure("a", "b", "GB/s", 2.0, 1.0, 4.0)
