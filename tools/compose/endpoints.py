"""Ask every instance in the registry for /health, /ready and /metrics, and print what each answered.

Usage: python -m tools.compose.endpoints encoder=2 prefill_decode=1 proxy=1
Broker and keys come from the environment, as for any process of the cluster. Exits with 1 if an instance is missing or
one of its answers is wrong, or if a worker beside the encoders has computed an encoder.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import httpx

from common.config import Settings
from common.keys import bearer, cluster_token, own_api_key
from common.messages import InstanceRecord
from launch.cli.members import Members

ENDPOINTS = ("health", "ready", "metrics")


async def check(settings: Settings, expected: dict[str, int]) -> list[str]:
    """Print a line for each instance; what is wrong, one sentence each."""
    async with Members(settings) as members:
        records = await members.records()
    found = Counter[str](record.role for record in records.values())
    problems = [
        f"{found[role]} instances of role {role} are registered, not {number}"
        for role, number in expected.items()
        if found[role] != number
    ]
    async with httpx.AsyncClient(timeout=10) as client:
        for record in sorted(records.values(), key=lambda record: (record.role, record.instance_id)):
            answers = [await _ask(client, record, endpoint, settings) for endpoint in ENDPOINTS]
            print(f"{record.role:15}{record.instance_id:14}{record.http_address:28}", *answers)
            problems += [f"{record.instance_id}: {answer}" for answer in answers if not answer.endswith("=200")]
    return problems


async def get(client: httpx.AsyncClient, record: InstanceRecord, endpoint: str, settings: Settings) -> httpx.Response:
    """Ask an instance with its key. Raises httpx.HTTPError where no answer comes."""
    base = record.http_address if "://" in record.http_address else f"http://{record.http_address}"
    key = own_api_key(settings) if record.role == "proxy" else cluster_token(settings)
    return await client.get(f"{base}/{endpoint}", headers={} if key is None else {"Authorization": bearer(key)})


async def _ask(client: httpx.AsyncClient, record: InstanceRecord, endpoint: str, settings: Settings) -> str:
    """`endpoint=status`, or with the reason where it is not as it should be."""
    try:
        answer = await get(client, record, endpoint, settings)
    except httpx.HTTPError as error:
        return f"/{endpoint}: {error!r}"
    if answer.status_code != 200:
        return f"/{endpoint}={answer.status_code} {answer.text}"
    if endpoint == "metrics" and (problem := _wrong_metrics(record, answer.text)):
        return f"/{endpoint}: {problem}"
    return f"/{endpoint}={answer.status_code}"


def _wrong_metrics(record: InstanceRecord, text: str) -> str | None:
    lines = text.splitlines()
    if not any(line.startswith("# TYPE ") for line in lines):
        return "not Prometheus' format"
    if record.role in ("prefill", "decode", "prefill_decode") and "triptych_encoder_computations 0.0" not in lines:
        return "it has computed an encoder: triptych_encoder_computations is not 0"
    return None


def main(arguments: list[str]) -> None:
    expected = {role: int(number) for role, _, number in (argument.partition("=") for argument in arguments)}
    if problems := asyncio.run(check(Settings(), expected)):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main(sys.argv[1:])
