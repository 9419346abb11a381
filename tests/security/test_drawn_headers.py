"""Drawn URLs of media and drawn heads of forms: whatever is in them is refused, and breaks nothing."""

from __future__ import annotations

import asyncio
import encodings
import pkgutil
import socket
from collections.abc import Iterator
from typing import Any

import httpcore
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Settings
from common.errors import TriptychError
from proxy.app import make_app
from proxy.media import addresses, fetch
from proxy.media.fetch import Fetcher
from proxy.media.intake import MediaIntake, MediaSource
from proxy.server.limits import ByteBudget, Reservation
from proxy.server.metrics import ProxyMetrics
from proxy.service import Service
from tests.security.fuzz import examples

LOOK_UP = socket.getaddrinfo

HOSTS = ("a", "xn--", "xn--a", "xn--fa-hia", "ß", "①", "\u200d", "🙂", ".", "..", ":", "::1", "[", "]", "@", "%", "%00")
PIECES = (*HOSTS, "%2e", "%5b", "/", "//", "\\", "?", "#", "-1", "65536", "9" * 30, " ", "\t", "\n", "\x00", "é", ",")
SCHEMES = ("http:", "https:", "HTTP:", "file:", "data:", "data:;base64,", "gopher:", "x", "")
texts = st.text(max_size=4)
rests = st.lists(st.sampled_from(PIECES) | texts, max_size=6).map("".join)
urls = st.builds("{}{}{}".format, st.sampled_from(SCHEMES), st.sampled_from(("//", "/", "", "////[")), rests)
"""Some of them URLs."""


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_drawn_urls_are_refused_wherever_they_come_from(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """From a client, and as where a page redirects to: every name is known here, and redirects there."""
    location = b""

    def look_up(host: str, port: int, **options: Any) -> Any:
        host.encode("idna")  # as the real one
        return LOOK_UP("8.8.8.8", port, **options)

    def network() -> httpcore.AsyncMockBackend:
        return httpcore.AsyncMockBackend([b"HTTP/1.1 302 Found\r\nLocation: %b\r\n\r\n" % location])

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(fetch.httpcore, "AnyIOBackend", network)
    settings, metrics = Settings(allowed_media_folder=tmp_path), ProxyMetrics()
    fetcher, held = Fetcher(settings), Reservation(ByteBudget(2**40, metrics))
    intake = MediaIntake(settings, fetcher, metrics, pytest.fail)  # nobody sends a video

    @examples(200)
    @given(urls)
    def check(url: str) -> None:
        nonlocal location
        location = url.encode()
        for given_url in (url, "http://page.example/"):
            with pytest.raises(TriptychError) as caught:  # no picture is drawn
                runner.run(intake.load([MediaSource("image", "image_url", given_url)], held))
            assert caught.value.info.http_status < 500

    check()
    fetcher.close()


ODD = st.sampled_from(("", "utf-8", "x", '"', "\x00", "undefined", "punycode", "raw_unicode_escape"))
charsets = ODD | st.sampled_from([module.name for module in pkgutil.iter_modules(encodings.__path__)])
PARAMETERS = ("boundary", "charset", "Charset", "charset*", "boundary*0", "filename", "")
VALUES = ("x", '"x"', '"', "", "\\", "x" * 5000, "UTF-8''%ff", "\x00", "é", "=", '"a;b"', "undefined", "punycode")
FORM = "multipart/form-data"
types = st.sampled_from((FORM, FORM, "Multipart/Form-Data ", "multipart/form-datax", "text/plain", "")) | texts
parameters = st.builds("{}={}".format, st.sampled_from(PARAMETERS), st.sampled_from(VALUES) | texts)
heads = st.lists(parameters, max_size=3)
fields = st.sampled_from(
    (
        'form-data; name="language"\r\n\r\nen',
        'form-data; name="language[]"\r\n\r\nen',
        'form-data; name="prompt"\r\n\r\n\\ud800+2AA-\x80\xff',
        'form-data; name="file"; filename="a"; filename*=UTF-8\'\'%ff\r\nContent-Type: x; charset=hex\r\n\r\nRIFF',
        'form-data; name="a"; filename="\\\\a\\b"\r\nContent-Transfer-Encoding: base64\r\n\r\n===',
        "form-data; name*=utf-8''a\r\n\r\n",
        'form-data; name="[]"\r\n\r\n',
        "x\r\n\r\n",
    )
)


def test_drawn_content_types_of_forms_are_the_clients_fault(runner: asyncio.Runner, whisper_model: Any) -> None:
    settings = Settings(model=str(whisper_model.folder), broker="redis://127.0.0.1:1")
    app = make_app(Service(settings, whisper_model, "proxy"), 0)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport, base_url="http://proxy")

    @examples(200)
    @given(types, charsets, heads, st.lists(fields, max_size=3))
    def check(media_type: str, charset: str, head: list[str], parts: list[str]) -> None:
        content_type = "; ".join([media_type, "boundary=x", f"charset={charset}", *head]).encode("latin-1", "replace")
        name = 'form-data; name="model"\r\n\r\nof another server'  # so that nobody looks for workers
        body = "".join(f"--x\r\nContent-Disposition: {part}\r\n" for part in (name, *parts)) + "--x--\r\n"
        request = http.post(
            "/v1/audio/transcriptions", content=body.encode("latin-1"), headers=[(b"content-type", content_type)]
        )
        response = runner.run(_awaited(request))
        assert 400 <= response.status_code < 500, response.text

    check()
    runner.run(http.aclose())


async def _awaited(request: Any) -> httpx.Response:
    return await request
