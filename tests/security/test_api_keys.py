"""API keys: who may call what, what the others are told, and that no secret is shown."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
import structlog
from pydantic import SecretStr

from common.config import Settings
from common.errors import TriptychError
from common.http.auth import proxy_guard, worker_guard
from common.keys import ClusterKey, TokenSet, api_keys, bearer, cluster_token, may_control
from tests.proxy.conftest import eventually
from tests.proxy.fake_decoders import FakeDecoder

KEY = "sk-of-one-user"
PROTECTED = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/audio/transcriptions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/requests/chatcmpl-1/timeline"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/no/such/route"),
)


async def test_everything_but_health_wants_a_key(serve):
    async with serve(api_key=KEY) as rig:
        for method, path in PROTECTED:
            response = await rig.http.request(method, path)
            assert (path, response.status_code) == (path, 401)
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
            allowed = await rig.http.request(method, path, headers={"Authorization": bearer(KEY)})
            assert allowed.status_code != 401
        for path in ("/health", "/ready"):
            assert (await rig.http.get(path)).status_code == 200


async def test_who_is_in_the_cluster_is_told_with_a_key_only(serve):
    async with serve(api_key=KEY, decoders=0) as rig:
        stranger = FakeDecoder(rig.cluster, "prefill_decode", "stranger")
        rig.cluster.decoders.append(stranger)
        await stranger.start(fingerprint="something else")
        await eventually(lambda: "stranger" in rig.service.pool.refused)

        async def reason(path: str, **headers: str) -> str:
            response = await rig.http.get(path, headers=headers)
            assert response.status_code == 503
            return response.json()["reason"]

        assert await reason("/ready") == await reason("/ready", Authorization=bearer("sk-other")) == "no decoder worker"
        told = await reason("/ready", Authorization=bearer(KEY))
        assert told.startswith("no decoder worker; stranger is not used: ")
        assert "something else" in told
        rig.service.pool.failure = "another process has the id proxy"
        for path in ("/health", "/ready"):
            assert await reason(path) == "this proxy cannot go on"
            told = await reason(path, Authorization=bearer(KEY))
            assert told == "this proxy cannot go on; another process has the id proxy"


async def test_openai_clients_send_it_as_they_always_do(serve):
    async with serve(api_key=KEY) as rig:
        with pytest.raises(openai.AuthenticationError, match="not one of this server's"):
            await rig.chat()
        client = rig.client.with_options(api_key=KEY)
        answer = await client.chat.completions.create(
            model=rig.model, messages=[{"role": "user", "content": "What does the sign say?"}]
        )
        assert answer.choices[0].finish_reason == "stop"


async def test_a_refused_body_is_never_read(serve):
    """The answer comes before the body does: a stranger cannot make the proxy hold megabytes."""
    async with serve(api_key=KEY) as rig, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(rig.base_url).port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_metrics_may_be_left_open(serve):
    async with serve(api_key=KEY, metrics_without_key=True) as rig:
        text = (await rig.http.get("/metrics")).text
        assert "triptych_proxy_requests_total" in text
        assert KEY not in text


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        KEY,
        f"Basic {KEY}",
        "Bearer",
        "Bearer ",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY} {KEY}",
        "Bearer \udcff\x00",
    ],
)
def test_what_is_no_key_opens_nothing(header):
    assert not TokenSet([KEY, "another"]).accepts(header)


def test_any_of_several_keys_opens(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# users\n\nsk-one\n  sk-two  \n")
    keys = api_keys(Settings(api_key=KEY, api_key_file=file))
    assert all(keys.accepts(bearer(key)) for key in (KEY, "sk-one", "sk-two"))
    assert not keys.accepts(bearer("# users"))
    assert keys.accepts(f"bearer  {KEY}")


def test_every_key_is_compared_whichever_matches(monkeypatch):
    """What is measured from outside must not tell which key, or how much of one, was right."""
    compared = []
    monkeypatch.setattr("common.keys.hmac.compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    keys = TokenSet(["first", "second", "third"])
    for given in ("first", "third", "wrong", ""):
        keys.accepts(bearer(given))
    assert compared == [(32, 32)] * 12


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_a_file_without_keys_opens_nothing_by_accident(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(TriptychError, match="has no key"):
        proxy_guard(Settings(api_key_file=file))
    with pytest.raises(TriptychError, match="cannot read api_key_file"):
        proxy_guard(Settings(api_key_file=tmp_path / "missing"))


async def test_keys_come_and_go_with_the_file_and_nobody_is_restarted(serve, tmp_path):
    file = tmp_path / "keys"
    file.write_text("sk-one\nsk-two\n")
    async with serve(api_key_file=file) as rig:

        async def status(key: str, path: str = "/v1/models") -> int:
            return (await rig.http.get(path, headers={"Authorization": bearer(key)})).status_code

        assert [await status(key) for key in ("sk-one", "sk-two", "sk-three")] == [200, 200, 401]
        (tmp_path / "new").write_text("sk-two\nsk-three\n")
        (tmp_path / "new").rename(file)
        assert [await status(key) for key in ("sk-one", "sk-two", "sk-three")] == [401, 200, 200]
        assert await status("sk-three", "/metrics/cluster") == 200


@pytest.mark.parametrize("text", ["", "# nobody\n", None])
def test_a_file_that_loses_its_keys_or_itself_locks_nobody_out_and_lets_nobody_in(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text("sk-one\n")
    guards = [proxy_guard(Settings(api_key_file=file)), worker_guard(Settings(api_key_file=file))]
    file.unlink() if text is None else file.write_text(text)
    with structlog.testing.capture_logs() as logs:
        for allows in guards * 2:
            assert allows("/metrics", bearer("sk-one"), None)
            assert not allows("/metrics", bearer("sk-other"), None)
    assert [one["event"] for one in logs] == ["the API keys stay as they were"] * 2, "once for each change"
    file.write_text("sk-other\n")
    assert all(allows("/metrics", bearer("sk-other"), None) for allows in guards)


def test_a_link_to_another_file_is_another_list(tmp_path):
    """As Kubernetes exchanges the files of a Secret."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"sk-{name}\n")
    file = tmp_path / "keys"
    file.symlink_to("one")
    allows = proxy_guard(Settings(api_key_file=file))
    assert allows("/v1/models", bearer("sk-one"), None)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(file)
    assert allows("/v1/models", bearer("sk-two"), None)
    assert not allows("/v1/models", bearer("sk-one"), None)


def test_without_keys_the_api_is_open():
    assert proxy_guard(Settings())("/v1/models", None, "203.0.113.9")


def test_a_worker_obeys_the_clusters_members_only():
    settings = Settings(cluster_key="ab" * 32, api_key=KEY)
    allows, token = worker_guard(settings), cluster_token(settings)
    for path in ("/drain", "/switch"):
        assert allows(path, bearer(token), "203.0.113.9")
        assert not allows(path, bearer(KEY), "203.0.113.9")
        assert not allows(path, None, "127.0.0.1")
    assert allows("/metrics", bearer(KEY), None)
    assert allows("/metrics", bearer(token), None)
    assert not allows("/debug/handoffs", None, "127.0.0.1")
    assert allows("/health", None, None)
    assert allows("/ready", None, None)


@pytest.mark.parametrize(
    ("host", "may"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False), (None, False), ("x", False)],
)
def test_without_a_cluster_key_this_machine_alone_controls_workers(host, may):
    assert may_control(None, None, host) is may
    assert worker_guard(Settings())("/drain", None, host) is may
    assert worker_guard(Settings())("/metrics", None, host)


def test_a_cluster_key_is_shown_nowhere():
    key = ClusterKey.generate()
    settings = Settings(cluster_key=key.reveal(), api_key=KEY, broker="redis://:word@127.0.0.1:1")
    for text in (repr(key), str(key), repr(settings), str(settings), key.token, key.key_id):
        assert key.reveal() not in text
        assert KEY not in text
        assert "word" not in text


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "ab" * 33, "ab" * 31])
def test_a_key_that_is_none_is_named_but_not_shown(text):
    with pytest.raises(TriptychError, match="64 hexadecimal digits") as caught:
        ClusterKey(text)
    assert not text or text not in str(caught.value)


def test_a_cluster_key_comes_by_value_or_by_file(tmp_path):
    file = tmp_path / "cluster.key"
    file.write_text("ab" * 32 + "\n")
    by_file = ClusterKey.of(Settings(cluster_key_file=file))
    by_value = ClusterKey.of(Settings(cluster_key=SecretStr("AB" * 32)))
    assert by_file.token == by_value.token
    assert ClusterKey.of(Settings()) is None
    with pytest.raises(TriptychError, match="cannot read cluster_key_file"):
        ClusterKey.of(Settings(cluster_key_file=tmp_path / "missing"))
