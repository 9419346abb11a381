"""The same of workers that prefill or decode only: the requests that they have are finished, or go on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.cli.serving import Serving
from tests.launch.cli.test_members import LEAVE_S, load, members, run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


async def test_prefill_and_decode_workers_leave_and_change_their_roles_and_no_request_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    serving = Serving(tmp_path, "signpost", "--topology", "1e2p2d", "--kv-cache-bytes", "32MiB")
    try:
        serving.wait_until("OpenAI API at")
        async with members() as cluster, load(serving.base_url):
            assert "p1 has the role decode now" in await run("switch", "p1", "--role", "decode")
            assert "d1 has left" in await run("drain", "d1")
            told: list[str] = []
            await cluster.switch("d0", "prefill", LEAVE_S, told.append)  # what decodes now is what prefilled
            assert "p0 has left" in await run("drain", "p0")
            roles = {name: record.role for name, record in (await cluster.records()).items()}
        assert roles == {"proxy": "proxy", "e0": "encoder", "p1": "decode", "d0": "prefill"}
    finally:
        serving.close()
