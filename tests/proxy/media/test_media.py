"""Media of every form, good and bad, and URLs that must not be followed."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import quote

import openai
import pytest

from common.messages import Encode
from proxy.media import addresses
from proxy.media.intake import sniff
from tests.proxy.sample_media import data_url, image_part, picture, speech


def _url_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


@asynccontextmanager
async def web_server(respond: Callable[[str], bytes], tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server on loopback whose whole response to a path is `respond(path)`; b"" never answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            response = respond(path)
            if response:
                writer.write(response)
                await writer.drain()
            else:
                await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


def _redirect(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


async def test_a_picture_by_url_is_fetched_through_redirects(serve):
    pages = {"/a": _redirect("/b"), "/b": _ok(picture())}
    async with web_server(pages.__getitem__) as url, serve(allow_private_media_urls=True) as rig:
        answer = await rig.chat([_url_part(f"{url}/a")])
        assert answer.choices[0].message.content == "a red sign"
        assert rig.cluster.encoders[0].of(Encode)[0].media == picture()


async def test_a_redirect_to_loopback_is_refused(serve, monkeypatch):
    """The first hop counts as public here; the second one is checked anew."""
    async with web_server(lambda path: _redirect("http://localhost:1/secret")) as url, serve() as rig:
        public = url.removeprefix("http://").partition(":")[0]
        seen: list[str] = []

        def first_is_public(address: str) -> bool:
            seen.append(address)
            return len(seen) == 1

        monkeypatch.setattr(addresses, "is_public", first_is_public)
        with pytest.raises(openai.BadRequestError, match="private network") as caught:
            await rig.chat([_url_part(url)])
        assert seen[0] == public
        assert "localhost" in str(caught.value)
        assert caught.value.param == "messages[0].content[0].image_url.url"


async def test_private_addresses_are_refused(rig):
    for host in ("127.0.0.1:1", "localhost", "[::1]", "10.1.2.3", "169.254.169.254"):
        with pytest.raises(openai.BadRequestError, match="private network"):
            await rig.chat([_url_part(f"http://{host}/x")])


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
    ],
)
def test_what_counts_as_public(address, public):
    assert addresses.is_public(address) is public


BAD_ANSWERS = (
    (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered 404"),
    (_ok(b"<html>"), "no known format"),
    (_ok(b"x" * 5000), "at most 4096"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", "99999 bytes"),
    (b"not HTTP at all\r\n\r\n", "cannot be fetched"),
    (_redirect("file:///etc/passwd"), "is not a URL of http or https"),
)


async def test_a_url_that_does_not_give_a_picture_is_the_clients_fault(serve):
    limits = {"allow_private_media_urls": True, "max_media_bytes": 4096}
    pages = {f"/{index}?token=secret": response for index, (response, _) in enumerate(BAD_ANSWERS)}
    async with web_server(pages.__getitem__) as url, serve(**limits) as rig:
        for index, (_, says) in enumerate(BAD_ANSWERS):
            with pytest.raises(openai.APIStatusError, match=says) as caught:
                await rig.chat([_url_part(f"{url}/{index}?token=secret")])
            assert caught.value.status_code in (400, 413)
            assert "secret" not in str(caught.value)


async def test_a_url_that_says_nothing_is_given_up(serve):
    limits = {"allow_private_media_urls": True, "media_timeout_s": 0.5}
    async with web_server(lambda path: b"") as url, serve(**limits) as rig:
        with pytest.raises(openai.BadRequestError, match=r"took longer than 0\.5 s") as caught:
            await rig.chat([_url_part(f"{url}/?token=secret")])
        assert "secret" not in str(caught.value)


async def test_an_error_without_words_has_its_name(serve):
    """Python's own words of a connection that ends before TLS has begun are none."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server, serve(allow_private_media_urls=True) as rig:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/sign.png"
        with pytest.raises(openai.BadRequestError, match=r"cannot be fetched: \w+Error"):
            await rig.chat([_url_part(url)])


async def test_endless_redirects_end(serve):
    async with web_server(lambda path: _redirect(path + "x")) as url, serve(allow_private_media_urls=True) as rig:
        with pytest.raises(openai.BadRequestError, match="more than 5 redirects"):
            await rig.chat([_url_part(url)])


BAD_URLS = (
    ("data:image/png;base64,!!!!", "not valid base64"),
    ("data:image/png;base64,", "is empty"),
    ("data:image/png;base64", "without a comma"),
    (data_url(b"plain text"), "no known format"),
    (data_url(speech(0.1)), "looks like wav"),
    ("ftp://example.org/x.png", "must be a URL with one of data:, http:, https:, not"),
    ("", "must be a URL with one of data:"),
)


async def test_bad_data_urls_name_their_place(rig):
    for url, says in BAD_URLS:
        with pytest.raises(openai.BadRequestError, match=says) as caught:
            await rig.chat([image_part(picture()), _url_part(url)])
        assert caught.value.param == "messages[0].content[1].image_url.url"
    assert rig.cluster.encoders[0].received == []


async def test_too_many_and_too_large_items_are_refused(serve):
    async with serve(max_media_items=2, max_media_bytes=200) as rig:
        with pytest.raises(openai.BadRequestError, match="3 media items"):
            await rig.chat([image_part(picture())] * 3)
        with pytest.raises(openai.APIStatusError, match="at most 200") as caught:
            await rig.chat([image_part(picture() + bytes(400_000))])
        assert caught.value.status_code == 413


async def test_a_picture_may_be_percent_encoded_and_what_would_be_too_large_is_not_decoded(serve, monkeypatch):
    async with serve(max_media_bytes=100_000) as rig:
        escaped = "".join(f"%{byte:02x}" for byte in picture())
        assert (await rig.chat([_url_part(f"data:image/png,{escaped}")])).choices[0].message.content == "a red sign"
        monkeypatch.setattr("proxy.media.intake.unquote", lambda text: pytest.fail("it was decoded"))
        with pytest.raises(openai.APIStatusError, match="has 100001 bytes, at most 100000") as caught:
            await rig.chat([_url_part("data:," + "%41" * 100_001)])
        assert caught.value.status_code == 413


async def test_base64_in_a_url_may_be_percent_encoded(rig):
    text = base64.b64encode(picture()).decode()
    answer = await rig.chat([_url_part("data:image/png;base64," + quote(text, safe=""))])
    assert answer.choices[0].message.content == "a red sign"


async def test_base64_may_have_line_breaks_and_nothing_else(rig):
    text = "data:image/png;base64,"
    lines = base64.encodebytes(picture()).decode()
    assert (await rig.chat([_url_part(text + lines)])).choices[0].message.content == "a red sign"
    for other in ("-", "\N{NO-BREAK SPACE}"):
        with pytest.raises(openai.BadRequestError, match="is not valid base64"):
            await rig.chat([_url_part(text + lines.replace("\n", other))])


def test_sniffing_knows_its_formats():
    assert sniff(picture()) == ("image", "png")
    assert sniff(speech(0.1)) == ("audio", "wav")
    assert sniff(b"\xff\xd8\xff\xe0") == ("image", "jpeg")
    assert sniff(b"\xff\xfb\x90\x00") == ("audio", "mp3")
    assert sniff(b"RIFF\0\0\0\0WEBPVP8 ") == ("image", "webp")
    assert sniff(b"RIFF\0\0\0\0AVI LIST") is None
    assert sniff(b"FORM\0\0\0\0AIFFCOMM") == sniff(b"FORM\0\0\0\0AIFCFVER") == ("audio", "aiff")
    assert sniff(b"\0\0\0\x1cftypM4A \0\0\0\0") == ("audio", "mov,mp4,m4a,3gp,3g2,mj2")
    assert sniff(b"\x1aE\xdf\xa3\x9fB\x86\x81") == ("audio", "matroska,webm")
    assert sniff(b"\xff\xf1\x50\x80") == ("audio", "aac")
    assert sniff(b"II*\0") == sniff(b"MM\0*") == ("image", "tiff")
    assert sniff(b"\0\0\0\x20ftypavif\0\0\0\0") == ("image", "avif")
    assert sniff(base64.b64encode(picture())) is None
    assert sniff(b"") is None
