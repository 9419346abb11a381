"""`triptych top`: the cluster as its proxy sees it, redrawn every second; on a pipe, once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.errors import TriptychError
from launch.cli.answers import draw_bar
from launch.cli.client import ApiClient, ClientOptions
from launch.cli.console import make_console, make_table

_BAR: Final = 10
_RECENT: Final = 8
_STATES: Final = {"ready": "green", "draining": "yellow", "connecting": "yellow"}


async def run_top(options: ClientOptions, every_s: float, *, once: bool) -> int:
    """Draw until Ctrl-C, or once; return 0. A proxy that stops answering is waited for.

    Raises TriptychError where nobody answers at first, or the server is not Triptych's proxy.
    """
    console = make_console()
    async with ApiClient(options) as client:
        await client.connect()
        picture = await _look(client)
        if once or not console.is_terminal:
            console.print(picture)
            return 0
        with Live(picture, console=console, screen=True, auto_refresh=False) as live:
            seen_s = time.monotonic()
            while True:
                await asyncio.sleep(every_s)
                try:
                    picture, seen_s = await _look(client), time.monotonic()
                    live.update(picture, refresh=True)
                except TriptychError as error:
                    late = Text(f"\nno answer for {time.monotonic() - seen_s:.0f} s: {error.info.message}", "red")
                    live.update(Group(picture, late), refresh=True)


async def _look(client: ApiClient) -> RenderableType:
    cluster = await client.read("/v1/cluster")
    recent = await client.read(f"/v1/requests?limit={_RECENT}")
    return draw(cluster, recent["data"])


def draw(cluster: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the view of the JSON of /v1/cluster and of the list in /v1/requests."""
    running = cluster["requests"]
    waiting = ", ".join(
        f"{queue['waiting']} {name} waiting ({queue['expected_wait_s'] or 0:.1f} s)"
        for name, queue in cluster["queues"].items()
    )
    head = Text.assemble(
        (f"{cluster['model']} ", "bold"),
        ("ready", "green") if cluster["ready"] else (f"not ready: {cluster['reason']}", "red"),
        f" · {running['running']} of {running['limit']} requests running · {waiting}"
        f" · {cluster['handoffs_per_s']:.1f} handoffs/s\n",
    )
    now_s = cluster["time_s"]
    return Group(head, _instances(cluster["instances"], now_s), Text(), _requests(requests, now_s))


def _instances(instances: Sequence[Mapping[str, Any]], now_s: float) -> Table:
    table = make_table("", ("id", "role", "state", "up", "running", "waiting", "requests", "tokens", "caches"))
    for one in instances:
        state = Text(one["state"], _STATES.get(one["state"], "red"))
        if one["reason"] and one["state"] != "draining":
            state.append(f" ({one['reason']})", "dim")
        elif one["next_role"]:
            state.append(f", then {one['next_role']}")
        caches = Text("  ").join(_cache(cache) for cache in one["caches"])
        counts = (one["running"], one["waiting"], one["outstanding"], one["outstanding_tokens"])
        shown = ("–" if count is None else str(count) for count in counts)
        table.add_row(one["id"], one["role"], state, _age(now_s - one["started_s"]), *shown, caches)
    return table


def _cache(cache: Mapping[str, Any]) -> Text:
    share = min(1.0, cache["used"] / cache["capacity"])
    bar = draw_bar(0, _BAR * share) if share else ""
    colour = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    return Text.assemble(f"{cache['name']} ", (f"{bar:{_BAR}}", f"{colour} on grey19"), f" {100 * share:3.0f} %")


def _requests(requests: Sequence[Mapping[str, Any]], now_s: float) -> Table:
    table = make_table("last requests", ("id", "route", "outcome", "prompt", "answer", "seconds", "longest stage"))
    for one in requests:
        outcome = one["outcome"] or "running"
        colour = {"ok": "green", "running": "yellow"}.get(outcome, "red")
        spans = [span for span in one["spans"] if span["stage"] != "proxy"]
        longest = max(spans, key=lambda span: float(span["end_s"] - span["start_s"]), default=None)
        stage = "" if longest is None else f"{longest['stage']} on {longest['instance']}"
        took_s = one["total_ms"] / 1000 if "total_ms" in one else max(0.0, now_s - one["created_s"])
        counts = (one.get("prompt_tokens"), one.get("completion_tokens"))
        tokens = ("–" if count is None else str(count) for count in counts)
        name, route = one["id"][-12:], one["route"].removeprefix("/v1/")
        table.add_row(name, route, Text(outcome, colour), *tokens, f"{took_s:.2f}", stage)
    return table


def _age(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes}:{rest:02d}"
