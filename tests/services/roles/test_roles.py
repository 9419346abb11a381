"""Which roles there are, which model they need, and how a process comes to another one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import redis

from common.errors import TriptychError
from common.families import find_family
from common.messages import WORKER_ROLES
from common.model_info import ModelInfo, load_model_info
from services.roles.factory import check_role
from services.worker import with_role


def text_model() -> ModelInfo:
    return dataclasses.replace(load_model_info("signpost"), family=find_family("LlamaForCausalLM"))


def test_a_model_with_media_allows_every_role() -> None:
    info = load_model_info("signpost")
    assert [check_role(role, info) for role in WORKER_ROLES] == list(WORKER_ROLES)


@pytest.mark.parametrize("role", ["encoder", "encode_prefill_decode"])
def test_a_text_model_needs_no_encoder(role: str) -> None:
    with pytest.raises(TriptychError, match="takes no media"):
        check_role(role, text_model())


def test_a_text_model_may_be_prefilled_and_decoded_apart() -> None:
    assert [check_role(role, text_model()) for role in ("prefill", "decode")] == ["prefill", "decode"]


@pytest.mark.parametrize("role", ["proxy", "decoder", ""])
def test_what_is_no_role_of_a_worker_is_named_beside_those_that_are(role: str) -> None:
    with pytest.raises(TriptychError, match="is none of encoder, prefill, decode") as caught:
        check_role(role, load_model_info("signpost"))
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_request", "role")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            ["-m", "launch.cli.app", "worker", "--role", "encoder"],
            ["-m", "launch.cli.app", "worker", "--role", "decode"],
        ),
        (
            ["triptych", "worker", "--role=prefill", "--port", "7"],
            ["triptych", "worker", "--role=decode", "--port", "7"],
        ),
    ],
)
def test_all_of_the_command_line_but_the_role_stays(before: list[str], after: list[str]) -> None:
    assert with_role(before, "decode") == after


def test_a_process_without_a_role_in_its_command_cannot_take_another_one() -> None:
    with pytest.raises(TriptychError, match="was not started with"):
        with_role(["-c", "import services"], "decode")


def test_a_worker_without_a_name_logs_under_the_one_that_it_makes_up(broker_url: str) -> None:
    variables = {"TRIPTYCH_BROKER": broker_url, "TRIPTYCH_CLUSTER": "nameless", "TRIPTYCH_LOG_FORMAT": "json"}
    variables |= {"TRIPTYCH_ENGINE__NUM_THREADS": "1", "TRIPTYCH_ENGINE__KV_CACHE_BYTES": "32MiB"}
    variables |= {"TRIPTYCH_ENGINE__ENCODER_CACHE_BYTES": "64MiB"}
    command = [sys.executable, "-m", "triptych", "worker", "--role", "decode", "--port", "0"]
    with (
        redis.Redis.from_url(broker_url) as client,
        subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            ready = next(json.loads(line) for line in process.stderr or () if '"event": "ready"' in line)
            assert client.exists(f"nameless:instance:{ready['instance']}")
        finally:
            process.terminate()
