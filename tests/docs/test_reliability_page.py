"""docs/design/reliability.md gives the waits that the code has: what is a constant there is read here."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.cluster import curve, registry
from broker.cluster.redis_client import SOCKET_TIMEOUT_S
from broker.handoff.channels import STREAM_TTL_S, ChannelSender
from broker.transports import routes
from broker.transports.linked import sender as linked
from broker.transports.nixl import sender as nixl_sender
from broker.transports.nixl import wire as nixl_wire
from broker.transports.redis import wire as redis_wire
from common.config import Settings
from common.process import child_pool
from engine.handoff import early_offers
from launch.cluster.supervisor import START_TIMEOUT_S, STOP_GRACE_S
from proxy.dispatch import worker_pool as workers
from proxy.media import audio as recordings
from services import membership, worker_context
from services import worker_process as shell
from services.encode import encode_stage as encoding
from services.process import drain as departure
from services.process import request_owners as proxies

PAGE = Path(__file__).parents[2] / "docs" / "design" / "reliability.md"
SETTINGS = Settings.model_fields


def bounds(wait: str) -> str:
    """All but the name of the row of a wait."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {wait}")]
    assert len(rows) == 1, f"{len(rows)} rows begin with {wait!r}"
    return rows[0].removeprefix(f"| {wait}")


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        ("the nonce of a sender", nixl_wire.NONCE_S),
        ("a silent sender over NIXL", nixl_wire.FORGET_S),
        ("a silent sender over NIXL", nixl_sender.GREETING_LASTS_S),
        ("a handshake over shared memory", linked.HANDSHAKE_S),
        ("a failed transport", routes.AVOID_S),
        ("an offer before its request", early_offers.KEEP_S),
        ("a message to the broker without an answer", ChannelSender.__init__.__defaults__[0]),  # type: ignore[index]
        ("a reply of the broker", SOCKET_TIMEOUT_S),
        ("a reply of the broker", shell.BEAT_S),
        ("a reply of the broker", membership.ANNOUNCE_WAIT_S),
        ("a heartbeat of a worker", registry.RECORD_TTL_S),
        ("a heartbeat of a worker", workers.ABSENCE_S),
        ("a heartbeat of a worker", registry.ABSENCE_S),
        ("a silent sender of a tensor through the broker", redis_wire.LEASE_S),
        ("a broken connection to a worker", registry.RECORD_TTL_S + workers.POLL_S),
        ("a heartbeat of a proxy", proxies.SILENCE_S),
        ("streams of a dead worker", STREAM_TTL_S),
        ("the receiver of an output", worker_context.LOOKUP_S),
        ("the broker, for a starting worker", shell.BROKER_WAIT_S),
        ("an encoder's preprocessing helpers", encoding.POOL_START_S),
        ("preprocessing helpers that start again", child_pool.START_S),
        ("a host that has vanished", curve.KEEPALIVE_IDLE_S + curve.KEEPALIVE_INTERVAL_S * curve.KEEPALIVE_PROBES),
        ("a host that has vanished", curve.UNACKNOWLEDGED_MS / 1000),
        ("an encoder's work on an item", encoding.KEEP_S),
        ("a model, until loaded", START_TIMEOUT_S),
        ("the broker, for a leaving worker", departure.ANNOUNCE_S),
        ("one step with a recording", recordings.TIMEOUT_S),
        ("a stop of a worker", STOP_GRACE_S),
    ],
)
def test_a_wait_lasts_as_long_as_the_page_says(wait: str, seconds: float) -> None:
    assert f" {seconds:g} s" in bounds(wait)


@pytest.mark.parametrize(
    ("wait", "setting"),
    [
        ("a request in the proxy", "request_timeout_s"),
        ("memory for KV", "request_timeout_s"),
        ("expected wait for a first token", "max_queue_s"),
        ("one step of a handoff", "handoff_timeout_s"),
        ("the next piece of a tensor over ZMQ", "handoff_timeout_s"),
        ("one piece of a tensor over NIXL", "handoff_timeout_s"),
        ("one image or audio clip in preprocessing", "handoff_timeout_s"),
        ("a step of an engine", "step_timeout_s"),
        ("the head of an HTTP request", "client_timeout_s"),
        ("media fetched from a URL", "media_timeout_s"),
    ],
)
def test_a_wait_that_can_be_set_has_the_default_that_the_page_says(wait: str, setting: str) -> None:
    assert f"`{setting}`, {SETTINGS[setting].default:g} s" in bounds(wait)
