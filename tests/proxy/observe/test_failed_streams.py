"""Streams that fail after their first events are seen by who watches a proxy: their HTTP status was 200."""

from __future__ import annotations

import openai
import pytest
from structlog.testing import capture_logs

from proxy.dispatch.text_stream import TextStream
from tests.proxy.conftest import eventually

ROUTE = "/v1/chat/completions"


async def _begin(rig):
    rig.cluster.decoders[0].pause_after = 1
    stream = await rig.chat(stream=True)
    await anext(aiter(stream))
    return stream


async def test_a_stream_that_fails_counts_as_its_error_and_is_told_in_the_log(serve):
    with capture_logs() as logs:
        async with serve(request_timeout_s=1) as rig:
            with pytest.raises(openai.APIError, match="request_timeout_s"):
                [chunk async for chunk in await _begin(rig)]
            await eventually(lambda: rig.count("requests_total", endpoint=ROUTE, status="504") == 1)
            assert rig.count("requests_total", endpoint=ROUTE, status="200") == 0
    [failed] = [entry for entry in logs if entry["event"] == "request failed"]
    assert (failed["code"], failed["log_level"]) == ("timeout", "warning")
    assert failed["request"].startswith("chatcmpl-")


async def test_a_bug_in_a_stream_counts_as_500_and_its_log_names_the_request(rig, monkeypatch):
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with capture_logs() as logs:
        monkeypatch.setattr(TextStream, "_observe_end", fail)
        stream = await rig.chat(stream=True)
        with pytest.raises(openai.APIError, match="its log has the details"):
            [chunk async for chunk in stream]
        await eventually(lambda: rig.count("requests_total", endpoint=ROUTE, status="500") == 1)
    [bug] = [entry for entry in logs if entry["log_level"] == "error"]
    assert (bug["event"], bug["path"], bug["request"][:9]) == ("unexpected error", ROUTE, "chatcmpl-")


async def test_a_client_that_leaves_a_stream_is_no_success(rig):
    await (await _begin(rig)).close()
    await eventually(lambda: rig.count("requests_total", endpoint=ROUTE, status="499") == 1)
    assert rig.count("requests_total", endpoint=ROUTE, status="200") == 0
