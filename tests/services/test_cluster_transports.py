"""Real workers hand over a picture by each transport that the setting names; shared memory is what others have."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Transport
from tests.broker.transports.transport_kit import NIXL
from tests.eventually import eventually
from tests.services.cluster import Proxy, about_pictures, cluster, encode_order, sign

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("transport", "scheme"),
    [("zmq", "tcp"), ("redis", "redis+list"), pytest.param(*NIXL.values, "nixl+tcp", marks=NIXL.marks)],
)
async def test_a_picture_goes_by_the_transport_of_the_setting(
    transport: Transport, scheme: str, broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_TRANSPORT", transport)
    with cluster(broker_url, tmp_path, {"e0": "encoder", "d0": "prefill_decode"}) as started:
        proxy = Proxy(started)
        await proxy.send("d0", about_pictures("r", [sign("red")], "What colour is the sign?"))
        await proxy.send("e0", encode_order("r", 0, sign("red")))
        assert (await proxy.answer("r")).startswith("red")
        assert started.records["d0"].tensor_address.startswith(f"{scheme}://")
        assert (await proxy.metrics("e0"))[f"triptych_tensors_sent_total{{outcome={scheme}}}"] == 1
        await eventually(proxy.is_idle, 10.0)
        await proxy.close()
        statuses, _ = started.stop()
        assert statuses == [0, 0]
