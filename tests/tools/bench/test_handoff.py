"""The benchmark of the handoff: real workers, every hop on the way of an encoder's output."""

from __future__ import annotations

import pytest

from services.process.handoff_trace import HOPS
from tools.bench import handoff as bench


@pytest.mark.cluster
def test_every_hop_between_two_workers_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "WARM_UP", 1)
    bench.handoff("signpost", count=2)
    rows = [line for line in capsys.readouterr().out.splitlines() if "→" in line]
    assert "encode done → stored" in "".join(rows)
    assert len(rows) == len(HOPS)
    assert "nan" not in "".join(rows)
