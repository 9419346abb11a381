"""A whole cluster as `serve` runs it: where it listens, what it tells, what it writes into a shared broker."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trustme
from redis import Redis

from broker.cluster.embedded import EmbeddedBroker
from common.config import Settings
from common.keys import bearer, cluster_token
from launch.cluster.local_cluster import LocalCluster
from tests.proxy.sample_media import picture
from tests.security.conftest import answer_about
from tests.security.rigs import on_a_thread
from tests.security.test_redis import tls_in_front_of
from tools.soak.memory import descendants

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
API_KEY, PASSWORD = secrets.token_urlsafe(16), secrets.token_urlsafe(16)


@dataclass
class Served:
    """A cluster at a broker behind TLS, where its user may do nothing outside its prefix; `admin` may do everything."""

    cluster: LocalCluster
    admin: Redis


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    authority, ca_file = trustme.CA(), tmp_path_factory.mktemp("authority") / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    with (
        EmbeddedBroker() as url,
        Redis.from_url(url, decode_responses=True) as admin,
        on_a_thread(lambda: tls_in_front_of(url, authority, "127.0.0.1")) as port,
    ):
        admin.execute_command(*acl_command("pictures", PASSWORD))
        settings = Settings(
            model="signpost",
            port=0,
            api_key=API_KEY,
            broker=f"rediss://triptych:{PASSWORD}@127.0.0.1:{port}?ssl_ca_certs={ca_file}",
            cluster="pictures",
            transport="redis",  # tensors have keys, too
            log_level="debug",
        )
        with LocalCluster(settings, "1e1pd") as cluster:
            yield Served(cluster, admin)


def acl_command(cluster: str, password: str) -> list[str]:
    """The rule that docs/how-to/security.md gives, for this cluster and password."""
    page = (ROOT / "docs" / "how-to" / "security.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("ACL SETUSER"))
    return line.replace("PASSWORD", password).replace("CLUSTER", cluster).split()


def ask(served: Served) -> str:
    return str(answer_about(served.cluster, picture(), API_KEY).finish_reason)


def test_every_key_is_below_the_clusters_prefix(served):
    """The server itself says so: what the cluster's user tries elsewhere is refused, and logged."""
    assert ask(served) == "stop"
    assert served.admin.acl_log() == []
    keys = served.admin.keys()
    assert keys
    assert [key for key in keys if not key.startswith("pictures:")] == []


def test_nothing_listens_beyond_loopback(cluster):
    """None of the processes that have come of it, its own broker and the helpers of its workers among them."""
    found = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of another test, and just gone
            found[pid] = listening(pid)
    everywhere = [address for addresses in found.values() for address in addresses]
    assert {ip_address(host).is_loopback for host, _ in everywhere} == {True}
    ports = {port for _, port in everywhere}
    assert httpx.URL(cluster.base_url).port in ports
    assert urlsplit(cluster.broker_url).port in ports
    for name in ("e0", "p0", "d0"):
        instance = cluster.instances[name]
        own = found[instance.child.pid]
        assert len(own) > 1, name  # for HTTP, for requests, and where it receives for tensors
        assert httpx.URL(instance.http_address).port in {port for _, port in own}


def test_secrets_are_in_no_command_line_log_or_metric(served):
    assert ask(served) == "stop"
    secret = {API_KEY, PASSWORD, served.cluster.supervisor.plan.settings.cluster_key.get_secret_value()}
    shown = [Path(f"/proc/{pid}/cmdline").read_text() for pid in process_ids(served)]
    for instance in served.cluster.instances.values():
        shown.append(instance.command.log.read_text())
        shown.append(get(served, instance.id, "/metrics", bearer(API_KEY)).text)
    assert any("triptych_" in text for text in shown)
    assert not [text for text in shown for word in secret if word in text]


def test_workers_want_a_key_on_their_own_endpoints(served):
    token = cluster_token(served.cluster.supervisor.plan.settings)
    for instance_id in ("e0", "pd0"):
        assert get(served, instance_id, "/health").status_code == 200
        for path in ("/metrics", "/debug/handoffs"):
            assert get(served, instance_id, path).status_code == 401
            assert get(served, instance_id, path, bearer(API_KEY)).status_code == 200
            assert get(served, instance_id, path, bearer(token)).status_code == 200
        address = served.cluster.instances[instance_id].http_address
        for path in ("/drain", "/switch"):
            for headers in ({}, {"Authorization": bearer(API_KEY)}):
                assert httpx.post(address + path, headers=headers, trust_env=False).status_code == 401
    assert ask(served) == "stop"


def get(served: Served, instance_id: str, path: str, authorization: str | None = None) -> httpx.Response:
    headers = {} if authorization is None else {"Authorization": authorization}
    return httpx.get(served.cluster.instances[instance_id].http_address + path, headers=headers, trust_env=False)


def process_ids(served: Served) -> list[int]:
    return [instance.child.pid for instance in served.cluster.instances.values()]


def listening(pid: int) -> list[tuple[str, int]]:
    """The addresses on which a process accepts TCP connections, by the kernel's own account."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            link = os.readlink(entry)
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(parse_address(fields[1], family))
    return found


def parse_address(text: str, family: socket.AddressFamily) -> tuple[str, int]:
    """`0100007F:1F90` as ("127.0.0.1", 8080): the address is in 32-bit words of the machine's own byte order."""
    host, _, port = text.partition(":")
    words = [int(host[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(host), 8)]
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)
