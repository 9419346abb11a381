"""`triptych status`: a table of a cluster's workers, or the same as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from common.messages import InstanceRecord
from launch.console import make_console
from launch.members import Members

if TYPE_CHECKING:
    from common.config import Settings


def show_status(settings: Settings, *, as_json: bool) -> None:
    """Print it. Raises TriptychError("unavailable") where the broker does not answer."""
    records = asyncio.run(_records(settings))
    if as_json:
        print(json.dumps([msgspec.to_builtins(record) for record in records], indent=2))
        return
    console = make_console()
    if not records:
        console.print(f"nobody is in cluster {settings.cluster!r}", highlight=False)
        return
    console.print(status_table(records, f"{settings.cluster}: {records[0].model}", time.time()))


async def _records(settings: Settings) -> list[InstanceRecord]:
    async with Members(settings) as members:
        records = await members.records()
    return sorted(records.values(), key=lambda record: (record.role, record.instance_id))


def status_table(records: Iterable[InstanceRecord], title: str, now_s: float) -> Table:
    """One row per worker; `now_s` is Unix time. The epoch of an instance is the moment of its start."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("id", "role", "epoch", "up", "requests", "tokens", "http", "state"):
        table.add_column(column, overflow="fold", header_style="dim")
    for one in records:
        table.add_row(
            one.instance_id,
            one.role,
            str(one.epoch),
            _duration(now_s - one.epoch / 1e9),
            str(one.outstanding),
            str(one.outstanding_tokens),
            one.http_address.rpartition("://")[2],
            "[yellow]draining[/]" if one.draining else "[green]ready[/]",
        )
    return table


def _duration(seconds: float) -> str:
    """`42 s`, `7 min` or `3.2 h`."""
    if seconds < 60:
        return f"{max(0, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
