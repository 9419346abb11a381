"""`triptych status`: a table of a cluster's workers, or the same as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from broker.cluster.registry import incompatibility
from common.messages import InstanceRecord
from launch.cli.console import make_console, make_table
from launch.cli.members import Members

if TYPE_CHECKING:
    from common.config import Settings


def show_status(settings: Settings, *, as_json: bool) -> None:
    """Print the status. Raises TriptychError("unavailable") without an answer of the broker."""
    records = asyncio.run(_records(settings))
    if as_json:
        print(json.dumps([msgspec.to_builtins(record) for record in records], indent=2))
        return
    console = make_console()
    if not records:
        console.print(f"nobody is in cluster {settings.cluster!r}", highlight=False)
        return
    refused = refusals(records)
    console.print(status_table(records, f"{settings.cluster}: {records[0].model}", time.time(), refused))
    for why in refused.values():
        console.print(f"not used: {why}", style="red", highlight=False, soft_wrap=True)


async def _records(settings: Settings) -> list[InstanceRecord]:
    async with Members(settings) as members:
        records = await members.records()
    return sorted(records.values(), key=lambda record: (record.role, record.instance_id))


def refusals(records: Collection[InstanceRecord]) -> dict[str, str]:
    """Return the workers not used by a proxy of the cluster, each with the reason."""
    proxies = [record for record in records if record.role == "proxy"]
    return {
        worker.instance_id: why
        for worker in records
        for proxy in proxies
        if (why := incompatibility(worker, proxy)) is not None and worker.role != "proxy"
    }


def status_table(records: Iterable[InstanceRecord], title: str, now_s: float, refused: Collection[str] = ()) -> Table:
    """Return a table with a row per instance; `now_s` is Unix time, `refused` are ids. An instance's epoch is the
    moment of the start."""
    table = make_table(title, ("id", "role", "epoch", "up", "requests", "tokens", "http", "state"))
    for one in records:
        table.add_row(
            one.instance_id,
            one.role,
            str(one.epoch),
            _duration(now_s - one.epoch / 1e9),
            str(one.outstanding),
            str(one.outstanding_tokens),
            one.http_address.rpartition("://")[2],
            _state(one, refused),
        )
    return table


def _state(one: InstanceRecord, refused: Collection[str]) -> str:
    if one.instance_id in refused:
        return "[red]not used[/]"
    if not one.draining:
        return "[green]ready[/]"
    return "[yellow]draining[/]" if one.next_role is None else f"[yellow]draining[/], then {one.next_role}"


def _duration(seconds: float) -> str:
    """`42 s`, `7 min` or `3.2 h`."""
    if seconds < 60:
        return f"{max(0, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
